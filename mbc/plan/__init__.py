"""A plan: its data model, its file, and all that follows from a plan alone. `verify` shares no code with the search.

* `model`: the plan
* `schema`: the layout of a plan file
* `encode`: a plan as JSON values
* `decode`: JSON values as a plan, checked
* `records`: strict reading of JSON values
* `file`: plan files
* `group`: the operations of a launch as one operation
* `kernel_call`: a launch as kernel providers see it
* `accumulation`: the part of a step that every mini-batch runs before the last one
* `cut`: the two halves of a step whose loss another program computes
* `verify`: the independent check of a plan
* `verify_optimizer`: the check of the optimizer that a plan names
* `verify_source`: the check of the source in a plan
* `verify_ranks`: the check of plans that share a mini-batch
* `execution`: symbolic execution: which value every byte holds
* `occupancy`: the last writer and the readers of every byte of a space
* `demand`: what a graph demands of a launch
* `kernels`: whether the kernels of a plan exist and accept their operands
* `newer_gpu`: kernels that bind a package to the architecture it was compiled for
* `prefetch`: device memory for the inputs of the next step
* `require_times`: the refusal of what needs predicted times, for plans that have none
* `live`: live bytes at each launch, by kind
* `memory`: bytes by kind, launch by launch
* `techniques`: what a program recomputes, offloads and divides
* `traffic`: what the links of a GPU carry
* `collectives`: what a plan of several GPUs sums over its ranks
* `summary`: a plan operation by operation
* `diff`: the differences between two plans
"""
