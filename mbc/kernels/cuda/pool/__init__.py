"""Pooling, by itself and fused with its neighbours.

* `pooling`: pooling, local response normalisation and upsampling
* `fused_pooling`: max pooling fused with relu and what comes before it
"""
