"""Kernels that are generated for pointwise operations and groups of them, from the operations' device expressions.

* `map_program`: the canonical program of a generated kernel
* `placement`: how values lie along the axes of the results
* `lowering`: the program of a request
* `generated_map`: the declaration of a generated kernel
"""
