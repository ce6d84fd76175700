"""GPUs as planning sees them: specifications, and those of this machine.

* `spec`: datasheets and measured ceilings of GPUs
* `target`: which GPU a plan is for, and how much of its memory is free
* `transfers`: copies between device and host: time, and what they cost concurrent kernels
* `cudnn`: the cuDNN that can be loaded here, and its version
"""
