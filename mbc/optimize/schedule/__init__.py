"""The schedule: launches in order, streams and waits, liveness of buffers, and the predicted time.

* `emit_launches`: selected kernels as launches over buffers
* `regions`: a program as regions: all launches of one operation
* `in_place`: outputs that alias an input
* `liveness`: the live range of each buffer
* `cross_stream_liveness`: until when launches of another stream may run
* `depth_first_groups`: which regions could run depth first, and which values they would recompute
* `depth_first_micro_batches`: operations executed depth first, micro-batch by micro-batch
* `split_updates`: a launch of many updates as several
* `gradient_buckets`: sums over ranks in few launches, of gradients at consecutive addresses
* `choose_buckets`: the choice of these sums' order and thread blocks
* `synchronise`: the waits of launches for launches of another stream
* `coalesce_waits`: waits at as few kernels as possible
* `contention`: slowdown of kernels by concurrent copies and kernels
* `convert_back`: values that are needed in two layouts again are kept in one of them
* `simulate`: the predicted time of a program
* `step_time`: the time of a step that accumulates the gradients of several mini-batches
"""
