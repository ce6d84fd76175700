"""GPUs: their specifications, and the GPUs of this machine.

* `streams`: spaces of buffers, streams of launches, alignment
* `driver_query`: a program that asks the driver for the GPUs' figures
* `driver_card`: GPUs of this machine as the driver describes them
* `card_names`: names of GPUs as people write them
* `datasheet`: figures of a card, and the peaks that follow from them
* `card_file`: figures of a card in a user's file, and what is wrong with them
* `instructions`: which instructions GPUs have, by compute capability
* `spec`: what planning uses of a GPU: limits of its datasheet, or measured ones
* `part`: parts of a GPU, by name
* `target`: which GPU a plan is for, and its free memory
* `topology`: links between the GPUs of this machine
* `numa`: host bridges and NUMA nodes of the GPUs of this machine
* `host_sharing`: copies of several GPUs with one host
* `transfers`: copies between device and host: their time, and how much they slow down concurrent kernels
* `collective_times`: collectives between GPUs: their time, and mutual slowdowns of collectives and kernels
* `cudnn_version`: the cuDNN of this machine, and its version
"""
