"""Exports a trained network as an ONNX model: its evaluation graph, with any number of samples.

* `nodes`: the operation that a rule receives, and the nodes that it appends
* `layers`: rules of convolutions, matrix products, normalisation, pooling and activations
* `attention`: rules of attention and of the bias of windows
* `shapes`: rules of arithmetic with repeated operands, reductions, shapes and resampling
* `export`: writes a source and a checkpoint as a file
"""
