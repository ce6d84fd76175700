"""What no plan can beat, and what is said where no plan fits.

lower_bounds        the critical path; the bytes of the most demanding operation
budget_lp           the time of a step within a budget
fused_remat_terms   the least additional time of fused rematerialization, for `budget_lp`
io_lower_bound      the fewest bytes that a step moves, however it is fused
measured_floor      the time of a step at best, from measured kernels
infeasible          MBC203 and MBC204
"""
