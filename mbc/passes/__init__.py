"""Passes over graphs, one a file, with the builder of graphs and their verifier.

* `build`: appends operations, with shape inference and unique names
* `verify`: checks a graph between passes
* `training_step`: network -> training graph: precision, backward pass, update, inference graph
* `reverse_mode`: reverse-mode differentiation
* `expand`: operations of a network, in the types of a precision
* `commute_relu_pool`: max pooling and relu, backwards in the order that moves fewer bytes
* `concat_statistics`: batch statistics of a concatenation from those of its parts
* `detached`: tensors that no gradient flows through, once the backward pass is written
* `gather_operands`: weights' gradients from the rows of all ranks, where that sends less than summing them
* `shard_optimizer`: gradients, updates and optimizer states in parts, one of each rank
* `rms_norms`: root mean square normalisation as one operation
* `stack_sums`: sums over the axis of a stack as sums of its parts
* `uses`: who makes and reads the values of a network, for these passes
* `relu_masks`: relu's gradient by ReLU bit masks in the place of relu's output
"""
