"""Measured times of one GPU with one cuDNN: SQLite files, and what they say of other sizes.

* `model`: a profile as planning sees it
* `signature`: a request as text
* `schema`: the tables of a profile's file
* `rows`: measurements made of their rows when they are asked for
* `check_file`: what the file of a profile may hold
* `read_profile`: a profile from its file
* `writer`: adding to a profile's file
* `locate`: where profiles lie, the bundled ones too, and which of them is good for a GPU
* `edit`: profiles merged and reduced
* `profile_diff`: what differs between two profiles
* `interpolate`: times between measured micro-batch sizes
* `other_rows`: times of fewer rows from a larger size, of a mini-batch from others
* `kernel_versions`: measurements of earlier versions of mbc's own kernels
* `partial_gpu`: what the profile of a whole GPU says of a part of it
* `other_gpu`: what the profile of a GPU says of another of its architecture
* `measured_workspace`: workspaces that kernels were measured with
"""
