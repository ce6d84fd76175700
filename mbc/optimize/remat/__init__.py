"""Decisions to keep, recompute or offload each value between two uses, so that a step fits its budget.

* `allowed_techniques`: the techniques that a trial may use
* `apply_decisions`: decisions, and the program that carries them out
* `undo_log`: entries of decisions and the live bytes that they lead to, which can be undone
* `live_bytes_ledger`: live bytes at every region under the decisions so far
* `transient_peak`: bytes that are live only while values are recomputed before a region
* `operand_peak`: lower bound of the peak live bytes of a draft, whatever is decided
* `draft_state`: the decisions of one draft so far, and the steps that change them
* `greedy`: the first choice, gap by gap, and the passes that follow it
* `local_search`: large neighbourhood search from there
* `exhaustive`: all sets of decisions, where there are few
* `segment_remat`: segments of the forward pass that are recomputed as a whole
* `fused_remat`: recomputation fused into a launch that reads the same operands
* `remat_without_statistics`: recomputation of a convolution without its statistics
* `offload`: values offloaded over the peak, and when their copies start
* `optimizer_offload`: optimizer states in host memory between steps
* `coalesce_copies`: copies moved next to one another, so that fewer kernels wait
"""
