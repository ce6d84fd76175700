"""A trained network as an ONNX model: its evaluation graph, the batch left open.

* `nodes`: what a rule is given, and writes nodes into
* `layers`: rules of convolutions, matrix products, normalisation, pooling and activations
* `attention`: rules of attention and of the bias of windows
* `shapes`: rules of arithmetic with repeated operands, reductions, shapes and resampling
* `export`: source and checkpoint -> file
"""
