"""The loop over everything above: from a table of candidates and a budget to a plan.

search                  the loop, and the plan
fit                     a step within the available bytes
variants                variants of a step by workspace, order and means, and which of them are placed
solution                a problem, and a step with addresses
reclaim_workspace       free bytes between placed values as workspace
reselect                other kernels for the operations of a draft
concurrent_stream       launches that run on a second stream of kernels
relu_masks              ReLUs that store a bit mask for their gradient
prediction_interval     the range of a predicted time
overhead                device memory that is reserved outside the arena
profiling_requests      what a profile should measure for a graph
"""
