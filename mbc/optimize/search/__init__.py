"""The loop: choose, order, place; where the budget is missed, choose again with what was learnt.

* `search`: the loop, and the plan that comes out of it
* `solution`: the problem, and a step with addresses that solves it
* `fit`: a step within a budget
* `variants`: ways to make room, compared and placed
* `reclaim_workspace`: workspaces between the buffers of a step whose decisions are made
* `reselect`: other kernels and divisions, all else as it is
* `concurrent_stream`: launches that move to a second stream of kernels
* `relu_masks`: which relus leave bit masks for their gradients
* `overhead`: device memory outside the arena
* `prediction_interval`: between what and what a predicted time should lie
* `profiling_requests`: what a plan needs measured, most important first
"""
