"""Losses, data movement, and operations on elements that have no device expression.

* `augment`: crops, mirrors, recolours and normalizes images of bytes
* `broadcast`: images and a number for each of their channels
* `cross_entropy_targets`: cross entropies of probabilities and of weighted classes
* `elementwise_loss`: mse, l1, smooth l1 and binary cross entropy, and their gradients
* `gather`: permutations, slices, padding and splitting, of any rank
* `loss`: losses, their gradients and their weighted sum
* `move`: changes of layout and type, concatenation, dropout
* `relu_mask`: ReLU bit masks, and ReLU's gradient by them
* `segmentation`: the Dice loss, its gradient, and counts of intersection over union
* `top_k`: top-k accuracy
"""
