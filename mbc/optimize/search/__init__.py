"""The search loop: select, schedule, place; where the budget is exceeded, select again within the bytes that are free.

* `search`: the loop, and all that its steps share
* `limits`: budget, workspace and other limits of a search
* `assemble_plan`: the plan of a solution
* `solution`: the problem, and a solution of it: a step with addresses
* `keep_all`: a step that keeps every value in the arena
* `fit_budget`: a step within a budget
* `variants`: variants of a step within the budget, compared and placed
* `smallest_step`: the smallest step of quick searches, which is the same for all budgets
* `reclaim_workspace`: workspaces in the gaps between the values of a step whose decisions are final
* `replace_micro_batches`: other kernels and divisions, all else unchanged
* `concurrent_stream`: launches that move to a second stream of kernels
* `host_sharing_gain`: the gain of a plan that accounts for the other ranks' copies
* `select_relu_masks`: ReLUs that store bit masks for their gradients
* `overhead`: device memory outside the arena
* `prediction_interval`: the interval of a predicted time
* `predicted_times`: times and intervals of both programs of a plan
* `profiling_requests`: requests to be profiled, most important first
* `decisive_requests`: the requests among these that can decide a plan
"""
