"""Which mini-batch trains fastest under a memory budget on the GPUs at hand, and which learning rate goes with it.

* `batch_ladder`: mini-batches that fit, each planned, with its images/s
* `noise_scale`: the gradient noise scale, and what follows from it: statistical efficiency and AdaScale's gain
* `rates`: how the learning rate changes with the batch
* `range_test`: the learning rate of the base batch
* `measured_noise`: the noise scale of a training
* `goodput`: the table of mini-batches, and the one that is taken
* `tuner`: runs all of them within a share of the training
* `tuning_file`: what a tuning has found, to go on from
"""
