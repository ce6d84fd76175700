"""Convolutions and linear layers in emulated fp32: three fp16 tensor-core products for one of fp32 (3xFP16)."""
