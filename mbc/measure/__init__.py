"""Benchmark harnesses: candidates run, checked and timed on a GPU, bounded and resumable.

* `need`: requests that a plan wants measured
* `measure`: measuring the requests of a plan
* `session`: measuring one request
* `size_ladder`: what measured sizes already say about smaller ones
* `offers`: candidates of every provider for one request
* `protocols`: what measuring asks of a harness
* `workbench`: the workbench of a real GPU
* `gpu`: context, stream, memory and captured graphs, by PyCUDA
* `clock`: times of calls inside a captured graph
* `harness`: runs, checks and times candidates
* `own_kernel_harness`: mbc's own kernels against their meaning
* `gemm_harness`: convolutions and linear layers against float64
* `gemm_trial`: operands and results of those
* `statistics_harness`: convolutions with batch statistics in the epilogue
* `operand_buffers`: operands of one operation on a GPU
* `random_operands`: random operands for any kind of operation
* `random_pool`: the numbers that they are cut from
* `compare`: distances between results, computed on the GPU
* `host_copies`: copies between device and pinned host memory, or another GPU's
* `kernel_library`: any candidate, by the code of a generated module
* `cudnn_library`: cuDNN's backend API through ctypes
* `cudnn_constants`: its constants
* `cudnn_engines`: convolutions of its graph API: engine configurations and plans
* `cudnn_legacy`: algorithms of its legacy API
* `processes`: a process for each GPU, and the messages to and from it
* `fleet`: several GPUs, a process for each, adding to one profile
* `worker`: the process that measures on one GPU
* `collectives`: collectives of one communicator, alone and beside kernels
* `collective_harness`: those of a real GPU
* `collective_fleet`: a process for each GPU, which meet in one communicator after another
* `collective_worker`: the process of one rank
* `peer_fleet`: one process that copies between two GPUs
* `peer_worker`: that process
* `host_fleet`: copies of several GPUs with the host at a time, a process for each
* `host_worker`: the process of one GPU
* `shared_copies`: what its copies reach meanwhile
"""
