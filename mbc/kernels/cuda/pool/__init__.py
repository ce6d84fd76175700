"""Pooling, alone and fused with its neighbours.

* `adaptive_pool`: pooling to any size
* `pooling`: pooling, local response normalization and upsampling
* `fused_pooling`: max pooling with ReLU, bias or batch normalization in its prologue, and their gradients
"""
