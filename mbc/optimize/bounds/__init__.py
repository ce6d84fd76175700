"""Lower bounds of all plans, in bytes and in time.

* `arena_bytes`: a bound on the arena: states and the operands of the most demanding operation
* `critical_path`: a bound on the time of steps with a concurrent stream
* `budget_lp`: a bound on the time of a step within a budget: a fractional knapsack
* `fused_remat_costs`: the least cost of fused rematerialization, for that bound
* `io_lower_bound`: the fewest bytes that a step moves outside its GEMMs, however it is fused
* `measured_floor`: the least time of a step on a GPU whose kernels were measured
* `infeasible`: why no plan can fit a budget, and what would lower the bound
"""
