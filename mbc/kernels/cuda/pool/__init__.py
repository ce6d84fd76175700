"""Pooling, by itself and fused with its neighbours.

* `adaptive_pool`: pooling to any size
* `pooling`: pooling, local response normalisation and upsampling
* `fused_pooling`: max pooling with relu, bias or batch normalisation in its prologue, and their gradients
"""
