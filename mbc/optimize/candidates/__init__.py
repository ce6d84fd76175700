"""What could run each operation: candidates of all providers, in all divisions into micro-batches.

* `table`: candidates by request, and the Pareto fronts of their divisions
* `rules`: which of them may be used
* `pareto`: divisions of which none is both slower and larger in workspace than another
* `scale_rows`: times of a micro-batch scaled from larger measured sizes
* `micro_batch`: whether `--micro-batch` can be kept
"""
