"""ONNX files as programs of ATen operations, which `mbc.interchange.translate` takes from there.

* `package`: the package `onnx`, an extra
* `read`: a file -> a program
* `tensors`: numbers of a file, or of files beside it
* `infer`: shapes of values, and what is constant
* `module_scopes`: the modules that nodes were made in
* `operator`: one node, and what a rule writes it as
* `expressions`: formulas of a rule as they are written
* `patterns`: layers that exporters spell out in several nodes
* `layers`: rules of convolutions, matrix products and dropout
* `windows`: where windows lie, and rules of pooling
* `normalization`: rules of normalisation
* `attention`: rules of attention and rotary embeddings
* `elementwise`: rules of activations and arithmetic
* `conditions`: rules of comparisons, choices, bounds and functions by cases
* `reductions`: rules of reductions and softmax
* `shapes`: rules of shapes, parts and concatenation
* `resize`: the rule of resampling, axis by axis
* `evaluator`: operators that the package's evaluator computes otherwise
* `check_onnx`: an imported network beside its file
"""
