"""What is kept, recomputed or offloaded between two uses, so that a step fits its budget.

* `apply_decisions`: decisions, and the program that carries them out
* `undo_log`: entries of decisions and the bytes that they take, which can be undone
* `live_bytes_ledger`: live bytes at every run under the decisions so far
* `transient_peak`: bytes that are live only while values are recomputed before a run
* `state`: decisions of one draft in the making, and the steps that change them
* `greedy`: the first choice, gap by gap, and what follows it
* `local_search`: large neighbourhood search from there
* `exhaustive`: all sets of decisions, where there are few
* `segment_remat`: segments of the forward pass that are recomputed as a whole
* `fused_remat`: recomputation fused into a launch that reads the same operands
* `remat_without_statistics`: recomputation of a convolution without its statistics
* `offload`: values offloaded over the peak, and when their copies start
* `optimizer_offload`: optimizer states in host memory between steps
* `coalesce_copies`: copies that travel together
"""
