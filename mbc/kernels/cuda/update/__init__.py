"""The end of a step.

* `optimizer`: the guard (loss scale, finite gradients), and SGD and AdamW of one tensor
* `clip_norm`: the guard that clips the gradients to a global norm, and the norm of one rank's parts of them
* `sharded`: SGD and AdamW of this rank's parts
* `multi_tensor`: one operation on each of many tensors, in few launches
"""
