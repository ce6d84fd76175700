"""mbc inside a training loop of PyTorch: `mbc.from_torch`.

* `targets`: which labels a loss leaves out, and what is wrong with targets
* `objective`: losses of torch as losses of the language
* `torch_optimizer`: optimizers of torch as entries of the `train` section
* `model_tensors`: tensors that go into a model and come out of it
* `copies`: a copy of a model, of which nothing leads back to it
* `own_backward`: gradients that a model computes by code of its own
* `model_weights`: parameters and statistics, between the model and the arena
* `exported_model`: which models are taken, and their program
* `reference`: what a model computes in float64 with its random layers off
* `check_model`: a network beside the model that it was imported from
* `watch`: what torch could change behind a trainer's back
* `trainer`: a model that mbc trains
"""
