"""Gradients of the image of a convolution of one place at a step of one, in bf16 and fp16: the product of
`mbc.kernels.own.pointwise` with weights that lie the other way."""

from __future__ import annotations

from dataclasses import replace

from mbc.kernels.own.pointwise import BY_ITSELF

_BY_ITSELF = replace(
    BY_ITSELF, kind="convolution_backward_data", file="pointwise_gradients.cu", launcher="pointwise_backward_data"
)

KERNELS = (_BY_ITSELF,)
