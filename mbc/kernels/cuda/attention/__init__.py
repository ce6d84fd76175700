"""Scaled dot-product attention.

* `attention`: forward and backward, by FMA and on tensor cores
"""
