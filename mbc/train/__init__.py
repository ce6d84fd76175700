"""Training a module on data: where batches come from, the learning rate, the loop, checkpoints that resume.

* `job`: what to train, and what the loop needs of a module
* `loop`: epochs of steps, test accuracy, checkpoints
* `epoch_run`: the steps of an epoch
* `epoch`: what is added up and told of an epoch
* `schedule`: the learning rate
* `epoch_figures`: by which epochs are compared
* `target_metric`: a value of a metric at which a training ends
* `data`: where the rows of an epoch come from
* `archives`: `.npz` files that are what they say
* `share`: the rows of a rank
* `loader`: batches from a Python function
* `inputs`: arrays of a data set as inputs of a network
* `accuracy`: which output tells how often a network is right
* `evaluation`: accuracy and metrics on test data
* `training_checkpoint`: checkpoints that a training resumes from
* `logs`: JSON lines and TensorBoard
* `divergence`: when a training is past saving
"""
