"""Passes over graphs, one a file, with the builder of graphs and their verifier.

* `graph_builder`: appends operations, with shape inference and unique names
* `check_graph`: checks a graph between passes
* `training_step`: network -> training graph: precision, backward pass, update, inference graph
* `optimizer_update`: the updates of parameters by the optimizer, and moving averages
* `reverse_mode`: reverse-mode differentiation
* `expand`: operations of a network, in the types of a precision
* `commute_relu_pool`: the backward passes of max pooling and ReLU in the order that moves fewer bytes
* `concat_statistics`: batch statistics of a concatenation from those of its parts
* `copy_control`: a copy of the control block that dropouts read, so that updates need not wait for them
* `detached`: removes `detach` once the backward pass is written
* `drop_biases`: the network without biases that an instance norm subtracts again
* `gather_operands`: gradients of weights from the rows of all ranks, where this sends less than an all-reduce
* `shard_optimizer`: gradients, updates and optimizer states in parts, one for each rank
* `rms_norms`: root mean square normalisation as one operation
* `stack_sums`: sums over the axis of a stack as sums of its parts
* `sum_convolutions`: convolutions of a large concatenation as sums of convolutions of its parts
* `order_operations`: an order of the operations of a step with fewer live bytes
* `uses`: makers and readers of the values of a network, for these passes
* `relu_bit_masks`: the gradient of ReLU from bit masks instead of its output
"""
