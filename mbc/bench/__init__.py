"""The benchmark `mbc bench`: a training step of mbc and of its peers in one run, with equal data and mathematics.

* `contender_messages`: the job of a contender, and its result
* `race`: runs the contenders, each in a process of its own and alone on the GPU, and compares them
* `contender`: the process of one contender
* `recipe`: a network as other frameworks run it
* `several_gpus`: a contender on several GPUs, a process for each
* `timing`: the time of a step
* `mbc_contender`: a package of mbc
* `torch_contender`: PyTorch: eager, as a CUDA graph, or compiled
* `torch_ranks`: PyTorch's DDP
* `torch_network`: a network as a PyTorch module
* `jax_contender`: JAX: one jitted step with donated state
* `jax_functions`: operations in JAX
"""
