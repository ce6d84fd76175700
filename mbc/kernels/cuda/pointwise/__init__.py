"""Elementwise operations, losses and data movement.

* `elementwise`: activations, their gradients, sums and products
* `loss`: losses, their gradients and their weighted sum
* `move`: changes of layout and type, concatenation, dropout
* `relu_mask`: ReLU bit masks, and relu's gradient by them
"""
