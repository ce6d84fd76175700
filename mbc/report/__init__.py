"""What commands print: text and JSON of plans, profiles and results. Nothing here decides anything.

* `columns`: plain-text tables
* `tables`: tables of a plan
* `devices`: the GPU of a plan, and what others of its machine make of its copies
* `show`: `mbc show`
* `documents`: JSON of `mbc show` and `mbc diff`
* `memory`: memory of a program as a curve in text
* `timeline`: the predicted timeline of a program, and what its copies cost
* `techniques`: what a plan recomputes, offloads and divides
* `collectives`: what a plan of several GPUs sums over ranks, hidden and exposed
* `roofline`: `mbc show --roofline`
* `ablation`: `mbc show --ablation`
* `differences`: `mbc diff`
* `step_times`: what is known of predicted steps, and of which of two is faster
* `figure_names`: what figures are called that differ between two plans
* `fit`: `mbc fit`
* `tune`: `mbc tune`
* `equivalence`: `mbc check`
* `measured`: a measured step beside the plan
* `step_record`: the file of a recorded step, measured beside predicted
* `trace`: `mbc trace`
* `html`: pages of one file: `mbc report`, `mbc diff -o`
* `launches`: `mbc check --launches`
* `profiles`: `mbc profile list` and `mbc profile diff`
* `bench`: `mbc bench`
"""
