"""Elementwise operations, losses and data movement.

* `broadcast`: images and a number for each of their channels
* `elementwise`: activations, their gradients, sums and products
* `loss`: losses, their gradients and their weighted sum
* `move`: changes of layout and type, concatenation, dropout
* `relu_mask`: ReLU bit masks, and relu's gradient by them
"""
