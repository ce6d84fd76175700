"""Whether a divided and fused plan computes what its network means: `mbc check`.

* `step_variants`: one network compiled as several variants, which must give the same step
* `rule`: what may differ between the divided and the undivided step
* `run_step`: one training step and one inference pass, and all that they give
* `operations`: every divided operation by itself: micro-batches against one call
* `calls`: kernel calls of one operation, taken out of a plan
* `launches`: every launch of a plan by itself, against float64
* `deviation`: how far an output is from what it must be, in units of roundoff
* `rounding_model`: how far correct rounding may take the outputs of a launch
* `float64`: what a launch must give, in float64: by NumPy or PyTorch
* `in_torch`: float64 by PyTorch on a GPU
* `torch_forms`: the meaning of operations on PyTorch's tensors
* `torch_image_forms`: gates and other later image operations on them
* `torch_attention`: attention on them
* `torch_convolutions`: convolutions in float64 by PyTorch's GEMMs
"""
