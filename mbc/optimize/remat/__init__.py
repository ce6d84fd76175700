"""What is kept, recomputed or offloaded, so that a step fits the available bytes.

live_bytes_ledger           live bytes as decisions change them
undo_log                    entries of decisions that can be undone within microseconds
apply_decisions             the program that carries decisions out
greedy                      decisions gap by gap, where most is live
segment_remat               the first decisions for small budgets, by segments
local_search                improves decisions (large neighbourhood search)
exhaustive                  all sets of decisions, where there are few
fused_remat                 values that another launch recomputes nearly for nothing
remat_without_statistics    convolutions that are recomputed without statistics in the epilogue
transient_peak              bytes that are live while values are recomputed
offload                     values that go to the host over the peak
optimizer_offload           optimizer states that stay in host memory between steps
coalesce_copies             copies that start or end together
"""
