"""Scaled dot-product attention.

* `attention`: forward and backward, by FMA and on tensor cores
* `attention_resident`: short sequences, with one head in the shared memory of a block
* `window_bias`: the bias of windows by offset, and the mask of shifted windows
"""
