"""The end of a training step: guard, updates, and operations on many tensors at once.

* `optimizer`: the guard (loss scale, finite gradients), and SGD, AdamW and the moving average of one tensor
* `clip_norm`: the guard that clips the gradients to a global norm, and the norm of one rank's parts of them
* `layerwise`: LARS and LAMB
* `sharded`: SGD and AdamW of this rank's parts
* `multi_tensor`: one operation on each of many tensors, in few launches
"""
