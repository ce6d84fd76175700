"""A compiled package at run time: `module` is the interface for users, `cuda` runs its plan on a GPU, `cpu` with NumPy.

* `module`: a compiled network that trains and predicts
* `module_states`: its states, read, written and saved
* `opened_plan`: its plan, open on a machine
* `halves`: a module whose step runs in two halves, around a loss that another program computes
* `opening`: finds a module's plan and opens the machine that runs it
* `machine`: the interface between a module and the machine that runs its plan
* `host`: the machine on a CPU
* `cuda`: the machine on a GPU, which runs programs
* `open_gpu`: its context, streams and memory
* `cpu`: the interpreter with NumPy, in one array of exactly the arena's size
* `driver`: PyCUDA's driver interface and a context
* `green_context`: streams on a part of a GPU
* `library`: a package's shared library, called through ctypes
* `membership`: the interface between a module and the ranks that share its mini-batches
* `connection`: a rank's communicator, and waits during which other ranks may fail
* `communicator`: one rank's part of an NCCL communicator
* `nccl_library`: NCCL's functions and configuration, through ctypes
* `nvml`: the memory of a GPU that is in use
* `usage`: the memory of a GPU that this process took
* `pinned`: pinned host memory
* `lender`: memory of another GPU
* `feeding`: inputs, control blocks and figures of the steps on a GPU
* `launch_order`: the order in which the interpreter runs launches of several streams
* `shadow`: the interpreter's record of the owner of each byte
* `arguments`: arguments of a module's calls other than arrays
* `arrays`: arrays that users pass: NumPy, DLPack, `__cuda_array_interface__`
* `dlpack`: DLPack
* `formats`: storage formats of elements
* `initial_states`: values of states before the first step
* `sliding_window`: predictions for images larger than the input
* `step_loss`: the loss that a step returns
* `reported_metrics`: metrics that a step reports beside its loss
* `output`: an output that stays in a GPU's memory
* `bindings`: where inputs, states and outputs are in a plan's memory
* `weights`: the tensors of a module's checkpoint
* `averaging`: moving averages that take the place of the weights
* `checkpoint`: checkpoints in the safetensors format
* `replace`: files that are written whole or not at all
* `turns`: which threads and processes may call a module
"""
