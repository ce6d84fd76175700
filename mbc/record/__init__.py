"""Records of what a GPU runs in a captured training step, node by node, measured with CUPTI.

* `recorder`: builds and loads the native part, and holds its records
* `step`: maps nodes to the launches of a plan, with medians over the steps
* `recording`: a recorder around the first steps of a module
"""
