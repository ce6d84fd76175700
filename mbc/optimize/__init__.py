"""The optimizer: from a training graph to a plan. `search` is the loop.

Its packages, lowest first:

* `effort`: the tuning constants of the search, each with meaning, unit and decision
* `candidates`: kernels that could run each operation, and its divisions into micro-batches
* `fusion`: operations that run as one launch
* `selection`: kernels, layouts and workspaces of all operations, chosen together
* `schedule`: launches, their order, streams and waits, and their predicted time
* `placement`: addresses of buffers
* `remat`: values that are kept, recomputed or offloaded, to fit a budget
* `bounds`: lower bounds of all plans, in bytes and time
* `search`: the loop over all of these
"""
