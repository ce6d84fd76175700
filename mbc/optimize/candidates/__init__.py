"""Which kernels can run each operation, and in which divisions into micro-batches.

table           candidates of every operation, asked once per distinct request
pareto          divisions of an operation that no other beats in time and workspace (micro-cuDNN)
scale_rows      times of a micro-batch scaled from larger measured sizes
micro_batch     `--micro-batch`: one given size for every convolution
"""
