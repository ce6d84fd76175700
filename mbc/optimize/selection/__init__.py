"""Kernels, layouts, divisions and workspaces of all operations, chosen together.

* `select`: one optimum over each program
* `fuse_by_layout`: fusion groups that save more than their changes of layout cost
* `layout_mincut`: the fastest layouts, by a minimum cut
* `workspace_division`: workspaces within one total, by a knapsack
"""
