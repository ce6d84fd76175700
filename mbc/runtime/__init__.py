"""A package in use: `module` is what a user holds; `cuda` runs its plan on a GPU, `cpu` interprets it with NumPy.

* `module`: a compiled network that trains and predicts
* `opening`: a module's plan and the machine that runs it
* `machine`: what a module needs of that machine
* `cuda`: a GPU
* `cpu`: NumPy, in one array of exactly the arena's size
* `driver`: PyCUDA: the driver and a context
* `green_context`: streams on a part of a GPU
* `library`: a package's shared library, through ctypes
* `membership`: what a module needs of the ranks that share its mini-batches
* `connection`: a rank's communicator, and waiting while other ranks may fail
* `nccl`: one rank's part of a communicator of NCCL
* `nccl_library`: NCCL's functions and configuration, through ctypes
* `nvml`: how much of a GPU's memory is in use
* `usage`: what this process took of it
* `pinned`: pinned host memory
* `lender`: memory of another GPU
* `feeding`: inputs into the arena of a GPU
* `launch_order`: order of launches of several streams in the interpreter
* `shadow`: who owns each byte: the interpreter's check
* `arguments`: arguments of a module's calls other than arrays
* `arrays`: what users pass: NumPy, DLPack, `__cuda_array_interface__`
* `dlpack`: DLPack
* `formats`: how elements are stored
* `initial_states`: what states hold before the first step
* `loss`: the number that a step returns
* `reported_metrics`: what a step reports beside it
* `output`: an output left in a GPU's memory
* `bindings`: where a user's values lie in a plan
* `weights`: what a module keeps in a checkpoint
* `averaging`: moving averages in the place of the weights
* `checkpoint`: checkpoints in the safetensors format
* `replace`: files that appear whole or not at all
* `turns`: who may call a module, and when
"""
