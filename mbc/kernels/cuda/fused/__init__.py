"""Fused operations: one pass over memory for several operations.

* `batch_norm_relu`: batch normalization, biases and ReLU with their neighbours
* `batch_norm_activation`: batch normalization with other activations after it
* `bias_activation`: biases with GELU, a scale or a residual sum after them
* `concat`: statistics, biases and batch normalization of the parts of a concatenation
"""
