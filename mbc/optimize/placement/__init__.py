"""An address for every buffer.

addresses       the arena and host memory of both programs
allocate        offsets of blocks: greedy, annealed, for few blocks proved by CP-SAT
skyline         placement from the bottom up
"""
