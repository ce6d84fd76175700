"""Benchmark harnesses that run, check and time candidates on a GPU, within a time limit and resumably.

* `need`: requests that a plan needs measured
* `measure`: measures the requests of a plan
* `session`: measures one request
* `size_ladder`: which smaller sizes need no measurement, given the larger ones
* `offers`: candidates of every provider for one request
* `protocols`: interfaces of a workbench and of its harnesses
* `workbench`: the workbench of a real GPU
* `gpu`: context, stream, memory and captured graphs, through PyCUDA
* `clock`: times of calls inside a captured graph
* `harness`: runs, checks and times candidates
* `own_kernel_harness`: compares mbc's own kernels with the NumPy reference
* `gemm_harness`: compares convolutions and linear layers with float64
* `gemm_trial`: operands and reference results of `gemm_harness`
* `statistics_harness`: convolutions with batch statistics in the epilogue
* `operand_buffers`: operands of one operation on a GPU
* `random_operands`: random operands for any kind of operation
* `random_pool`: the random numbers from which operands are cut
* `compare`: distances between results, computed on the GPU
* `host_copies`: copies between device memory and pinned host memory or another GPU's memory
* `generated_libraries`: libraries of generated kernels, compiled on demand
* `kernel_library`: runs any candidate through the code of a generated module
* `cudnn_library`: cuDNN's backend API through ctypes
* `cudnn_constants`: constants of cuDNN's backend API
* `cudnn_engines`: engine configurations of cuDNN's graph API, and which may be used
* `cudnn_passes`: kinds of convolutions as the graph API describes them
* `cudnn_graph`: graphs and execution plans of convolutions in the graph API
* `legacy_algorithms`: convolution algorithms of cuDNN's legacy API
* `gpu_processes`: one process for each GPU, and the messages to and from it
* `fleet`: one process for each GPU; all write to one profile
* `worker`: the process that measures on one GPU
* `collective_timing`: times of collectives, alone and beside kernels
* `collective_harness`: measures collectives on a real GPU
* `collective_fleet`: one process for each GPU; all join one communicator after another
* `collective_worker`: the process of one rank
* `peer_fleet`: starts one process that copies between two GPUs
* `peer_worker`: the process that copies between two GPUs
* `host_fleet`: copies between the host and several GPUs at a time, one process for each GPU
* `host_worker`: the process that copies between the host and one GPU
* `shared_copies`: rates of one GPU's copies while other GPUs copy
"""
