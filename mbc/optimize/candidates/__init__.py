"""Candidates to run each operation: kernels of all providers, in all divisions into micro-batches.

* `table`: candidates by request
* `fronts`: the Pareto fronts of their divisions into micro-batches
* `numbered_answers`: answers of the table by the number of a request
* `user_rules`: the candidates that the user's settings admit, and the error where none is left
* `pareto`: divisions of which none is both slower and larger in workspace than another
* `estimates`: times that nobody measured on this GPU
* `measured_rows`: for which numbers of rows a profile has times of a network
* `scaled_times`: times of a micro-batch or a mini-batch scaled from other measured sizes
* `micro_batch`: the check that `--micro-batch` is possible
"""
