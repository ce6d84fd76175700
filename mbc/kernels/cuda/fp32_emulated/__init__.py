"""Emulated fp32: three fp16 tensor-core products (3xFP16, 22-bit significand).

* `fp32_emulated_conv`: convolutions
* `fp32_emulated_halo`: convolutions with a halo in shared memory, stride 1
* `fp32_emulated_halo_filter`: filter gradients with a halo, three taps wide
* `fp32_emulated_linear`: linear layers
"""
