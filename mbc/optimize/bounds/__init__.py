"""Lower bounds: what no plan can beat, in bytes and in time.

* `lower_bounds`: bounds of a network: peak live bytes, serial and concurrent time
* `budget_lp`: a bound on the time of a step within a budget: a fractional knapsack
* `fused_remat_terms`: what fused rematerialization costs at least, for that bound
* `io_lower_bound`: the fewest bytes that a step moves outside its GEMMs, however it is fused
* `measured_floor`: what a step takes at best on a GPU whose kernels were measured
* `infeasible`: why no plan can fit a budget, and what would lower the bound
"""
