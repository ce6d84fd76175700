"""Fused operations: one pass over memory for several operations.

* `batch_norm_relu`: batch normalisation, biases and relu with their neighbours
* `batch_norm_activation`: batch normalisation with other activations behind it
* `bias_activation`: biases with gelu, a scale or a residual sum behind them
* `concat`: statistics, biases and batch normalisation of the parts of a concatenation
* `wiring`: how a kernel recognises its fusion group
"""
