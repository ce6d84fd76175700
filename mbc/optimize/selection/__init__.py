"""One kernel, layout and division for every operation.

select                  the optimum under a limit of workspace per operation
layout_mincut           the layouts that are fastest together, by a minimum cut
workspace_division      one total of workspace divided among all operations, by CP-SAT
"""
