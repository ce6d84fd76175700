"""Graphs of operations: a network as written, and its training step.

* `types`: element types, layouts and tensor types
* `graph`: the whole intermediate representation, on one page
* `optional`: settings that are written only where they are set
* `parameter_groups`: what an optimizer does with each parameter
* `averages`: names of moving averages
* `control`: the control block: what changes from step to step
* `metrics`: names of the metrics that a source reports
* `ranks`: how a mini-batch is shared by ranks
* `text`: readable text of a graph
* `build`: appends operations, with shape inference and unique names
* `verify`: checks a graph between passes
* `transforms`: the passes, one a file
"""
