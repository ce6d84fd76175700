"""The mini-batch that trains fastest within a memory budget on the available GPUs, and its learning rate.

* `batch_ladder`: mini-batches that fit, each with a plan and its images/s
* `noise_scale`: the gradient noise scale, and what follows from it: statistical efficiency and AdaScale's gain
* `rates`: the learning rate as a function of the mini-batch
* `range_test`: the learning rate of the base batch
* `measured_noise`: the noise scale of a training
* `goodput`: the table of mini-batches, and the best of them
* `tuner`: runs range test and measurement within a share of the training
* `tuning_file`: a file with the results so far, to resume from
"""
