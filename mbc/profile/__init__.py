"""Measured times of one GPU with one cuDNN: SQLite files, and estimates from them for other sizes and GPUs.

* `paths`: where profiles are, including the bundled ones
* `model`: a profile in memory
* `signature`: a request as text
* `schema`: the tables of a profile's file
* `rows`: measurements that are decoded when they are needed
* `check_file`: rules for the contents of a profile's file
* `read_profile`: reads a profile from its file
* `writer`: adds to a profile's file
* `locate`: the profile that applies to a GPU
* `edit`: merges profiles and reduces them
* `profile_diff`: differences between two profiles
* `interpolate`: times between measured micro-batch sizes
* `other_rows`: times of fewer rows from a larger size, and of a mini-batch from others
* `kernel_versions`: measurements of earlier versions of mbc's own kernels
* `partial_gpu`: estimates for a part of a GPU from the profile of the whole
* `other_gpu`: estimates for a GPU from the profile of another one of its architecture
* `measured_workspace`: workspaces with which kernels were measured
"""
