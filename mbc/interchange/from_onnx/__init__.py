"""ONNX files as programs of ATen operations, which `mbc.interchange.translate` translates further.

* `package`: the optional package `onnx`
* `read`: reads a file as a program
* `program_so_far`: the program while the file is read, which rules read and add to
* `tensors`: numbers of a file, or of files beside it
* `infer`: shapes of values, and the values that are constant
* `module_scopes`: the modules that nodes were exported from
* `operator`: one node, and the methods by which a rule translates it
* `expressions`: formulas of a rule, written as Python expressions
* `patterns`: layers that exporters write as several nodes
* `layers`: rules of convolutions, matrix products and dropout
* `windows`: positions of windows, and rules of pooling
* `normalization`: rules of normalisation
* `attention`: rules of attention and rotary embeddings
* `elementwise`: rules of activations and arithmetic
* `conditions`: rules of comparisons, choices, bounds and functions by cases
* `reductions`: rules of reductions and softmax
* `shapes`: rules of shapes, parts and concatenation
* `resize`: the rule of resampling, axis by axis
* `evaluator`: operators that the package's evaluator computes differently from the standard
* `check_onnx`: compares an imported network with its file
"""
