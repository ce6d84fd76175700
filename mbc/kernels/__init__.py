"""Kernels: providers of GPU kernels, what they accept, and estimated times.

* `base`: the interface of providers: requests, candidates, acceptance
* `launch_struct`: integers of launches, declared once for Python and C++
* `launch_operands`: operands of launches by name, for Python and C++
* `calibration`: estimated times: a roofline fitted to a measured GPU
* `convolution_shapes`: convolutions in the form that libraries take
* `cudnn`: the provider `cudnn`: cuDNN's graph API
* `cudnn_convolution`: convolutions of the provider `cudnn`
* `cudnn_estimates`: estimated workspace and time of these convolutions
* `cudnn_statistics`: convolutions of the provider `cudnn` with batch statistics in the epilogue
* `statistics`: requests with batch statistics in the epilogue, for any provider
* `cudnn_legacy`: the provider `cudnn_legacy`: cuDNN's legacy API, with FFT and Winograd
* `cublaslt`: the provider `cublaslt`: linear layers and pointwise convolutions as GEMMs
* `nccl`: the provider `nccl`: collectives
* `cuda`: the provider `mbc`: the project's own CUDA kernels
* `interpreter`: the provider of plans that only the interpreter runs
* `providers`: all providers, in the order that decides between kernels of equal time
"""
