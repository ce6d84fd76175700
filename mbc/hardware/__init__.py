"""GPUs: their specifications, and the GPUs of this machine.

* `streams`: spaces of buffers, streams of launches, alignment
* `spec`: datasheets and measured ceilings of GPUs
* `part`: parts of a GPU, by name
* `target`: which GPU a plan is for, and its free memory
* `topology`: links between the GPUs of this machine
* `numa`: host bridges and NUMA nodes of the GPUs of this machine
* `host_sharing`: copies of several GPUs with one host
* `transfers`: copies between device and host: their time, and how much they slow down concurrent kernels
* `collective_times`: collectives between GPUs: their time, and mutual slowdowns of collectives and kernels
* `cudnn_version`: the cuDNN of this machine, and its version
"""
