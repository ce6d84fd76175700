"""Kernels, layouts, divisions and workspaces of all operations, chosen together.

* `select`: one optimum over each program
* `selector`: choices and fusion groups of one table, each made once
* `layout_mincut`: the fastest layouts, by a minimum cut
* `workspace_division`: workspaces within one total, by a knapsack
"""
