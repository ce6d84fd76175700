"""Graphs of operations: a network as written, and its training step.

* `types`: element types, layouts and tensor types
* `graph`: the whole intermediate representation, on one page
* `optional`: settings that are written only where they are set
* `parameter_groups`: the optimizer's settings of each parameter
* `averages`: names of moving averages
* `kept_gradients`: names of gradients that a step leaves to its caller
* `control`: the control block: numbers that change from step to step
* `metrics`: names of the metrics that a source reports
* `ranks`: the rows of a mini-batch that each rank gets
* `text`: readable text of a graph
"""
