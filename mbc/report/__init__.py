"""The output of commands: text and JSON of plans, profiles and results.

This package only formats; it takes no decisions.

* `columns`: plain-text tables
* `tables`: tables of a plan
* `devices`: the GPU of a plan, and the effect of the machine's other GPUs on its copies
* `show`: `mbc show`
* `documents`: JSON of `mbc show` and `mbc diff`
* `memory`: memory of a program as a curve in text
* `timeline`: the predicted timeline of a program, and the cost of its copies
* `techniques`: recomputed, offloaded and divided values of a plan
* `collectives`: collectives of a plan for several GPUs, hidden and exposed
* `roofline`: `mbc show --roofline`
* `ablation`: `mbc show --ablation`
* `differences`: `mbc diff`
* `step_times`: times of predicted steps, and which of two is faster
* `figure_names`: names of the figures that differ between two plans
* `fit`: `mbc fit`
* `prospects`: `mbc nnunet plan`
* `tune`: `mbc tune`
* `equivalence`: `mbc check`
* `measured`: a measured step beside the plan
* `step_record`: the file of a recorded step, with measured and predicted times
* `trace`: `mbc trace`
* `html`: pages of one file: `mbc report`, `mbc diff -o`
* `launches`: `mbc check --launches`
* `profiles`: `mbc profile list` and `mbc profile diff`
* `bench`: `mbc bench`
"""
