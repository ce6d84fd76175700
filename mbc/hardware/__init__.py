"""GPUs as planning sees them: specifications, and those of this machine.

* `streams`: spaces of buffers, streams of launches, alignment
* `spec`: datasheets and measured ceilings of GPUs
* `part`: parts of a GPU, by name
* `target`: which GPU a plan is for, and how much of its memory is free
* `topology`: what carries bytes between the GPUs of this machine
* `numa`: host bridges and memory next to GPUs of this machine
* `host_sharing`: copies of several GPUs with one host
* `transfers`: copies between device and host: time, and what they cost concurrent kernels
* `collective_times`: collectives between GPUs: time, and what they and concurrent kernels cost each other
* `cudnn_version`: the cuDNN that can be loaded here, and its version
"""
