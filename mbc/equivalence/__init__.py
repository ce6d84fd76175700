"""Checks that a divided and fused plan computes the step of its network: `mbc check`.

* `step_variants`: one network compiled as several variants, which must give the same step
* `rule`: the largest difference allowed between the divided and the undivided step
* `run_step`: one training step and one inference pass, with all of their results
* `operations`: each divided operation alone: micro-batches against one call
* `calls`: kernel calls of one operation, taken from a plan
* `launches`: each launch of a plan alone, against float64
* `deviation`: the error of an output, in units of roundoff
* `rounding_model`: the largest error of a launch's outputs that correct rounding may cause
* `float64`: the exact results of a launch in float64, by NumPy or PyTorch
* `in_torch`: float64 by PyTorch on a GPU
* `torch_functions`: operations as functions of PyTorch
* `torch_forms`: the meaning of operations on PyTorch's tensors
* `torch_image_forms`: the meaning of gates and other image operations on PyTorch's tensors
* `torch_attention`: the meaning of attention on PyTorch's tensors
* `torch_convolutions`: convolutions in float64 by PyTorch's GEMMs
"""
