"""From selected kernels to launches: their order, streams and waits, what is live when, and how long it all takes.

emit_launches               launches over buffers, in the order of the graph
in_place                    outputs that take over the bytes of an input
split_updates               multi-tensor launches split, so that parts run earlier
depth_first_micro_batches   consecutive layers executed one micro-batch after another
regions                     the runs of a program: launches that belong together
liveness                    the launches during which buffers hold bytes
cross_stream_liveness       the same where two streams of kernels run
synchronise                 waits between streams
coalesce_waits              the same waits at fewer kernels
contention, simulate        slowdown of concurrent launches; the predicted time of a program
"""
