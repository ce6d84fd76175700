"""Fusion: which operations run as one launch.

* `fusion_group`: operations and the launches that may run them
* `pattern`: a group as a small program to be found in a graph
* `catalogue`: the patterns of fused operations, and of fused rematerialization
* `catalogue_activations`: patterns of other activations, and of the blocks of transformers
* `catalogue_conv1x1`: patterns around pointwise (1x1) convolutions
* `data_flow`: groups of pointwise operations that follow from data flow, without a pattern
* `match_patterns`: all matches of patterns in a program
* `fused_remat_match`: launches that recompute a value as well
* `select_groups`: selection of the fusion groups that save time
* `horizontal`: independent operations of one kind in one launch
* `bitwise_remat_match`: kernels that must match what other launches recompute, bit by bit
"""
