"""Batch normalisation and other reductions over a channel.

* `along`: softmax and the largest element along axes
* `batch_norm`: biases, statistics and gradients of batch normalisation
* `batch_norm_single_launch`: batch normalisation of small tensors in one launch each way
* `group_norm`: group and layer normalisation
* `reduce`: sums over any axes
* `rms_norm`: root mean square normalisation, by the kernels of `group_norm`
* `standardize`: standardised filters of convolutions
* `sync_batch_norm`: what is gathered from the ranks that share a mini-batch, as one
* `bn_backward_remat`: backward reductions with fused rematerialization of relu's output
"""
