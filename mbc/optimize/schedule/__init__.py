"""Launches: their order, streams and waits, when buffers are live, and the predicted time.

* `emit_launches`: chosen kernels as launches over buffers
* `regions`: a program as its runs: all launches of one operation
* `in_place`: outputs that take over the bytes of an input
* `liveness`: when the bytes of each buffer are taken
* `cross_stream_liveness`: how long launches of another stream go on
* `depth_first_micro_batches`: operations executed depth first, micro-batch by micro-batch
* `split_updates`: one launch for many operations, in pieces
* `synchronise`: which launch waits for which launch of another stream
* `coalesce_waits`: waits at as few kernels as possible
* `contention`: what copies cost concurrent kernels, and kernels each other
* `simulate`: the predicted time of a program
"""
