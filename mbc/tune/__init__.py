"""What the choice of a batch and its learning rate rests on.

* `noise_scale`: the gradient noise scale, and what follows from it: statistical efficiency and AdaScale's gain
"""
