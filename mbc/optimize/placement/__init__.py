"""Placement: an address for every buffer in the arena or in host memory.

* `assign_addresses`: addresses of the buffers of a draft
* `place_blocks`: offsets of blocks: greedy, skyline, annealing, CP-SAT
* `skyline`: blocks placed by the skyline heuristic
"""
