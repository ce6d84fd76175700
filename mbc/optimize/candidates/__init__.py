"""What could run each operation: candidates of all providers, in all divisions into micro-batches.

* `table`: candidates by request, and the menus made of them
* `rules`: which of them may be used
* `pareto`: divisions that no other beats in both time and workspace
* `scale_rows`: times of a micro-batch from larger measured sizes
* `micro_batch`: whether `--micro-batch` can be kept
"""
