"""Batch normalization and other reductions over channels and axes.

* `along`: softmax and the largest element along axes
* `batch_norm`: biases, statistics and gradients of batch normalization
* `batch_norm_single_launch`: batch normalization of small tensors, one launch forward and one backward
* `group_norm`: group and layer normalization
* `reduce`: sums over any axes
* `rms_norm`: root mean square normalization, by the kernels of `group_norm`
* `standardize`: standardized filters of convolutions
* `sync_batch_norm`: combines statistics and sums gathered from the ranks that share a mini-batch
* `bn_backward_remat`: backward reductions with fused rematerialization of ReLU's output
"""
