"""Exports a trained network as an ONNX model: its evaluation graph, with any number of samples.

* `nodes`: the operation that a rule receives, and the nodes that it appends
* `declared`: rules that follow from the declarations of operations
* `layers`: rules of convolutions, matrix products, normalisation and pooling
* `attention`: rules of attention and of the bias of windows
* `shapes`: rules of arithmetic with repeated operands, reductions, shapes and resampling
* `export`: writes a source and a checkpoint as a file
"""
