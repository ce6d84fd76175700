"""What could run each operation: candidates of all providers, in all divisions into micro-batches.

* `table`: candidates by request
* `fronts`: the Pareto fronts of their divisions into micro-batches
* `user_rules`: which of them the user's settings admit, and what is said where none is left
* `pareto`: divisions of which none is both slower and larger in workspace than another
* `estimates`: times that nobody measured on this GPU
* `measured_rows`: for which numbers of rows a profile knows a network
* `scaled_times`: times of a micro-batch or a mini-batch scaled from other measured sizes
* `micro_batch`: whether `--micro-batch` can be kept
"""
