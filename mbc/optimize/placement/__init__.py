"""Placement: an address for every buffer in the arena or in host memory.

* `assign_addresses`: addresses of the buffers of a draft
* `block_file`: files of blocks that `mbc place` reads and writes
* `place_blocks`: offsets of blocks: greedy, skyline, annealing, search
* `skyline`: blocks placed by the skyline heuristic
* `skyline_search`: blocks placed within a limit by depth-first search
* `skyline_state`: the states of that search: partial placements, and where they are stuck
"""
