"""Which operations run as one launch.

pattern                 the language of fusion patterns, and how one is found in a graph
catalogue               the patterns
catalogue_conv1x1       those around pointwise (1x1) convolutions
select_groups           vertical fusion: the groups that take less time than their operations
horizontal              multi-tensor launches of small independent operations
bitwise_remat_match     convolutions that a fused launch can recompute bit by bit
"""
