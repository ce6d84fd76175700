"""Scaled dot-product attention.

* `attention`: forward and backward, by FMA and on tensor cores
* `window_bias`: the bias of windows by offset, and the mask of shifted ones
"""
