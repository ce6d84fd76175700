"""GPUs without a kernel running: what is known of them, and what this machine has.

* `spec`: datasheets and measured ceilings of GPUs
* `target`: which GPU a plan is for, and how much of its memory is free
* `transfers`: copies between device and host: time, and what they cost concurrent kernels
* `cudnn`: the cuDNN that can be loaded here, and its version
"""
