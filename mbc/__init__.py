"""mbc: an ahead-of-time compiler for training convolutional networks under a hard GPU memory budget.

Packages and files, lowest first: each imports only those before it, which `tests/test_import_order.py` proves.

* `version`: the version of mbc
* `source`: source text and places in it
* `units`: sizes as people write and read them
* `errors`: errors that a user can act on: code, place, reason and remedy
* `files`: files that a user names, read if they are regular and not too long
* `resources`: where templates, grammar and data lie, in a checkout and in a wheel
* `options`: everything that a compilation can be told beside its source
* `collection`: planning without searches for cyclic garbage
* `provenance`: digests of the code that a result vouches for
* `progress`: what is shown while something runs
* `stages`: runs stages by name, and adds up their seconds
* `ranks`: processes of one training, one a GPU
* `hardware`: GPUs: datasheets, what this machine has, copies to and from the host
* `ir`: graphs of operations and types of tensors
* `ops`: what each operation means, its shapes and its gradient; the layers of the language
* `passes`: the passes over graphs, with their builder and verifier
* `kernels`: providers of kernels: what they accept, need and should take
* `frontend`: source text as a network
* `profile`: measured times: SQLite files, interpolation and scaling
* `plan`: the plan: data model, file, independent verification
* `codegen`: a plan as C++ and CUDA sources, and the library built of them
* `runtime`: a package in use: on a GPU, or interpreted with NumPy
* `analysis`: a plan beside the limits of the hardware
* `measure`: benchmark harnesses: candidates run, checked and timed on a GPU
* `record`: what a GPU runs in a replayed step, node by node, by CUPTI
* `train`: the training loop: data, learning rate, checkpoints
* `interchange`: models of other frameworks as sources and weights, and weights back
* `equivalence`: whether divided and fused steps compute what they must
* `optimize`: a training graph as a plan
* `measuring`: the stage that measures what a plan needs before it is made
* `constraints`: which kernels, divisions and bytes a search may use
* `planner`: searches with measurements between them, for all GPUs of a mini-batch
* `compiler`: the driver: all stages from source to package
* `fit`: the largest mini-batch, and the time of a step, within budgets
* `ablation`: what each technique contributes to a plan
* `tune`: which mini-batch and learning rate to train with
* `bench`: training steps of mbc, PyTorch and JAX in one run
* `pytorch`: training inside a loop of PyTorch
* `report`: what commands print, as text and JSON
* `editor`: what an editor shows of a source, and the language server
* `cli`: the command `mbc`
* `__main__`: `python -m mbc`
"""

from __future__ import annotations

import sys
from typing import Any

from mbc.version import __version__ as __version__


def from_torch(
    model: Any,
    example: Any,
    *,
    loss: Any,
    optimizer: Any,
    targets: Any = None,
    clip_norm: float = 0.0,
    accumulate: int = 1,
    ema: float = 0.0,
    memory: str | int = "auto",
    precision: Any = "fp32",
    device: str = "auto",
    seed: int = 0,
    measure_for: str | None = None,
    check: bool | None = None,
    progress: bool = True,
) -> Any:
    """Return a `mbc.pytorch.trainer.Trainer`, which replaces forward, backward and `optimizer.step()` in a loop.

    Args:
        model: A model in training mode. It is run once, as a copy.
        example: The input of one mini-batch, or several inputs in a tuple. Every step must have as many rows.
        loss: A name of the language, an `nn` loss, or any function of the outputs and the targets that returns one
            number. For several outputs also a list with a name or `nn` loss, a pair (loss, weight) or None for each.
        optimizer: `torch.optim.SGD`, `AdamW`, or `Adam` without weight decay. A training goes on from its state.
        targets: An example of the targets, if a target gives the probability of each class.
        clip_norm: The largest L2 norm of all gradients, as in `clip_grad_norm_`; 0: no clipping.
        accumulate: Mini-batches like the example whose gradients an update averages. `step` takes all of them at once,
            as one tensor with that many times the rows.
        ema: The decay of moving averages of all weights, which `trainer.averages()` returns; 0: none.
        memory: The GPU memory that mbc may use (`12GB`, or a number of bytes).
        precision: `fp32`, `bf16`, `fp16`, `fp64`, or the PyTorch type of that name.
        device: `auto`, `cuda`, or `cpu`, on which NumPy computes.
        seed: The seed of dropout and other random layers.
        measure_for: The longest time to measure kernels that no profile has (`90s`; None: until all are measured). The
            most important kernels are measured first; the others are estimated.
        check: Whether a step of the network is compared with a step of the model, in float64 on the CPU with two rows:
            outputs, loss, gradients and statistics. None: only if that takes less than 10 seconds, by an estimate.
        progress: Whether progress is shown on stderr.

    Raises MBC330 to MBC333, MBC337, MBC167 and MBC303 for parts of the model that mbc does not support, and the errors
    of a compilation.
    """
    from mbc.pytorch.make_trainer import make_trainer

    return make_trainer(
        model, example,
        loss=loss, optimizer=optimizer, targets=targets, clip_norm=clip_norm, accumulate=accumulate, ema=ema,
        memory=memory, precision=precision, device=device, seed=seed, measure_for=measure_for, check=check,
        progress=progress,
    )  # fmt: skip


def module(
    model: Any,
    example: Any,
    *,
    memory: str | int = "auto",
    reserve: str | int | None = None,
    precision: Any = "fp32",
    device: str = "auto",
    fallback: str = "torch",
    seed: int = 0,
    measure_for: str | None = None,
    check: bool | None = None,
    contiguous: bool = False,
    progress: bool = True,
) -> Any:
    """Return `model` itself, whose forward and backward pass are a plan from now on; the loop stays as it is.

    Parameters and buffers stay PyTorch's tensors, in the plan's memory; `.grad`, any loss and any optimizer work.
    Inputs of another shape get a program of their own, if it fits into that memory. Several forward passes may await
    their backward pass. A call that no program covers (gradients in eval mode, hooks of inner modules) runs in PyTorch,
    with one warning that says why. `model.forward.planned.close()` ends the plan.

    Args:
        model: A model in training mode. It is run once, as a copy.
        example: The largest input, or several inputs in a tuple. If one has `requires_grad`, the plan also
            computes the gradients of inputs.
        memory: The GPU memory that this process may take (`12GB`, or a number of bytes), as nvidia-smi shows it:
            context, libraries and code, PyTorch's tensors and what its allocator keeps, and the plan's arena with
            parameters, gradients and activations. `auto`: all that is free. Planning and measuring may take more for a
            while. After two steps the process is measured, and the model is planned again if it takes too much. On the
            CPU it limits the plan alone, as if a GPU ran it: what a GPU's context and libraries take counts as well.
        reserve: The part of `memory` for the optimizer's state, the loss and mini-batches, which do not exist yet.
            None: 8 bytes for each trained parameter, and six copies of inputs and outputs.
        precision: `fp32`, `bf16`, `fp16`, `fp64`, or the PyTorch type of that name.
        device: `auto`, `cuda`, or `cpu`, on which NumPy computes.
        fallback: `torch` runs in PyTorch what mbc does not plan; `error` refuses it.
        seed: The seed of dropout and other random layers.
        measure_for: The longest time to measure kernels that no profile has (`90s`; None: until all are measured).
        check: Whether a step is compared with a step of the model, as in `from_torch`.
        contiguous: Whether weights and gradients are contiguous, as `view` needs them (LBFGS, pruning,
            `parameters_to_vector`). Otherwise those of convolutions may be channels-last, which is faster.
        progress: Whether progress is shown on stderr.

    Raises MBC167 for a wrong setting, MBC333 for a model that has a plan, and with `fallback="error"` MBC330, MBC337,
    MBC303, MBC339 and MBC341 at a call, and the errors of a compilation.
    """
    from mbc.pytorch.make_module import plan_module

    return plan_module(
        model, example,
        memory=memory, reserve=reserve, precision=precision, device=device, fallback=fallback, seed=seed,
        measure_for=measure_for, check=check, contiguous=contiguous, progress=progress,
    )  # fmt: skip


def _plan_html(plan: Any) -> str:
    """Return a plan as a notebook shows it."""
    from mbc.report.html.notebook import plan_fragment

    return plan_fragment(plan)


def _module_html(module: Any) -> str:
    """Return the plan of a module as a notebook shows it."""
    return _plan_html(module.plan)


def _fit_html(fit: Any) -> str:
    """Return a result of `mbc fit` as a notebook shows it."""
    from mbc.report.html.notebook import fit_fragment

    return fit_fragment(fit)


def _register_with_ipython() -> None:
    """Register with IPython, if it runs, how it shows plans, modules and results of `mbc fit`.

    IPython gets the names of the classes, so nothing of mbc is imported before such an object is shown.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    html = shell.display_formatter.formatters["text/html"]
    html.for_type_by_name("mbc.plan.model", "Plan", _plan_html)
    html.for_type_by_name("mbc.runtime.module", "Module", _module_html)
    for name in ("BatchFit", "BudgetCurve"):
        html.for_type_by_name("mbc.fit", name, _fit_html)


_register_with_ipython()
