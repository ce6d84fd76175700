"""mbc inside a training loop of PyTorch: `mbc.module` and `mbc.from_torch`.

* `targets`: targets of a step, and the labels that a loss ignores
* `objective`: PyTorch's losses as losses of the language
* `torch_optimizer`: PyTorch's optimizers as entries of the `train` section
* `model_tensors`: inputs and outputs of a model
* `copies`: copies of a model that share nothing with the model
* `own_backward`: models with a `torch.autograd.Function`, which are refused
* `exported_model`: the models that are accepted, and their programs
* `reference`: runs a model in float64, with its random layers off
* `check_model`: compares a network with the model that it was imported from
* `eval_checks`: compares the inference pass of a plan with the model in eval mode
* `compiled_model`: the compilation of a model's source
* `model_changes`: changes of a model that make its plan wrong
* `leaves`: the trained parameters as one input of a planned step in PyTorch's graph
* `shared_states`: parameters, statistics and gradients as tensors over the plan's memory
* `process_memory`: the memory of a GPU that the process takes, and what it may take
* `optimizer_states`: momentum and moments as tensors over the plan's memory
* `own_loss`: losses that PyTorch computes between the halves of a step
* `trainer`: a model that mbc trains
* `make_trainer`: plans a model and its loss
* `gradients_out`: the gradients of a step, as PyTorch's backward pass leaves them
* `planned_program`: the plan of a model for one shape of its inputs
* `second_derivatives`: gradients that can be differentiated again, by a pass in PyTorch
* `pending_passes`: forward passes that await their backward pass
* `calling_thread`: the thread in which PyTorch computes backward passes on a GPU
* `planned_module`: a model whose forward and backward pass are a plan
* `make_module`: plans a model
* `nnunet`: nnU-Net's trainer with steps of mbc
"""
