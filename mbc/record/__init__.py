"""What a GPU runs when a captured step is replayed, node by node, measured by CUPTI.

* `recorder`: builds and loads the native part, and holds what it recorded
* `step`: nodes to the launches of a plan, medians over the steps
* `recording`: a recorder around the first steps of a module
"""
