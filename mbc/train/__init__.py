"""Training of a module on data: sources of batches, the learning rate, the loop, checkpoints to resume from.

* `job`: the description of a training, and the part of a module that the loop needs
* `loop`: epochs of steps, tests, checkpoints
* `epoch_run`: the steps of an epoch
* `epoch`: sums over an epoch, and reports of its state
* `schedule`: the learning rate
* `epoch_figures`: figures by which epochs are compared
* `target_metric`: a value of a metric at which a training ends
* `data`: sources of an epoch's rows
* `cases`: patches of volumes of any size
* `volumes`: files of one or several images
* `nifti`: NIfTI files
* `archives`: checks of `.npz` files from elsewhere
* `share`: the rows of a rank
* `loader`: batches from a Python function
* `inputs`: arrays of a data set as inputs of a network
* `accuracy`: the output and the target that give a network's accuracy
* `evaluation`: accuracy and metrics on test data
* `training_checkpoint`: checkpoints from which a training resumes
* `logs`: JSON lines and TensorBoard
* `divergence`: when a training can no longer learn
"""
