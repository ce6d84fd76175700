"""mbc inside a training loop of PyTorch: `mbc.from_torch`.

* `objective`: losses of torch as losses of the language
* `optimizer`: optimizers of torch as entries of the `train` section
* `model`: which models are taken, and their program
* `weights`: parameters and statistics, between the model and the arena
* `trainer`: a model that mbc trains
"""
