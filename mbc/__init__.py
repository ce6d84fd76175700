"""mbc: an ahead-of-time compiler for training convolutional networks under a hard GPU memory budget.

Packages and files, lowest first: each imports only those before it (but `ir` and `plan`, which are split:
`tests/test_import_order.py`).

* `source`: source text and places in it
* `errors`: errors that a user can act on: code, place, reason and remedy
* `units`: sizes as people write and read them
* `files`: files that a user names, read if they are regular and not too long
* `resources`: where templates, grammar and data lie, in a checkout and in a wheel
* `options`: everything that a compilation can be told beside its source
* `aliases`: names in data that were renamed since
* `collection`: planning without searches for cyclic garbage
* `provenance`: digests of the code that a result vouches for
* `ranks`: processes of one training, one a GPU
* `progress`: what is shown while something runs
* `ir`: graphs of operations, and the passes over them
* `ops`: what each operation means, its shapes and its gradient; the layers of the language
* `frontend`: source text as a network
* `hardware`: GPUs: datasheets, what this machine has, copies to and from the host
* `kernels`: providers of kernels: what they accept, need and should take
* `plan`: the plan: data model, file, independent verification
* `codegen`: a plan as C++ and CUDA sources, and the library built of them
* `runtime`: a package in use: on a GPU, or interpreted with NumPy
* `profile`: measured times: SQLite files, interpolation and scaling
* `measure`: benchmark harnesses: candidates run, checked and timed on a GPU
* `analysis`: a plan beside the limits of the hardware
* `optimize`: a training graph as a plan
* `measuring`: the stage that measures what a plan needs before it is made
* `constraints`: which kernels, divisions and bytes a search may use
* `stages`: runs stages by name, and adds up their seconds
* `compiler`: the driver: all stages from source to package
* `fit`: the largest mini-batch, and the time of a step, within budgets
* `ablation`: what each technique contributes to a plan
* `record`: what a GPU runs in a replayed step, node by node, by CUPTI
* `train`: the training loop: data, learning rate, checkpoints
* `tune`: which mini-batch and learning rate to train with
* `interchange`: models of other frameworks as sources and weights, and weights back
* `pytorch`: training inside a loop of PyTorch
* `equivalence`: whether divided and fused steps compute what they must
* `bench`: training steps of mbc, PyTorch and JAX in one run
* `report`: what commands print, as text and JSON
* `editor`: what an editor shows of a source, and the language server
* `cli`: the command `mbc`
"""

from __future__ import annotations

from typing import Any

__version__ = "0.2.0.dev0"


def from_torch(
    model: Any,
    example: Any,
    *,
    loss: Any,
    optimizer: Any,
    targets: Any = None,
    clip_norm: float = 0.0,
    memory: str | int = "auto",
    precision: Any = "fp32",
    device: str = "auto",
    seed: int = 0,
    measure_for: str | None = None,
    check: bool | None = None,
    progress: bool = True,
) -> Any:
    """Return a `mbc.pytorch.trainer.Trainer`: it takes the place of forward, backward and `optimizer.step()` in a loop.

    Args:
        model: A model in training mode. It is run once, as a copy.
        example: The input of one mini-batch, or several in a tuple; every step has as many rows.
        loss: A name of the language or an `nn` loss. For several outputs a list with a loss, a pair (loss, weight) or
            None for each.
        optimizer: `torch.optim.SGD`, `AdamW`, or `Adam` without weight decay, not used yet.
        targets: An example of the targets, where a target gives the probability of each class.
        clip_norm: The largest L2 norm of all gradients, as by `clip_grad_norm_`; 0: they are not clipped.
        memory: What mbc may take of the GPU (`12GB`, or a number of bytes).
        precision: `fp32`, `bf16`, `fp16`, `fp64`, or such a type of torch.
        device: `auto`, `cuda` or `cpu`, where NumPy computes.
        seed: Of dropout and other random layers.
        measure_for: How long kernels are measured that no profile has, at most (`90s`; None: until all are), those
            first that matter most; the rest is estimated.
        check: Whether a step of the network is compared with one of the model in float64, on the CPU and two rows:
            outputs, loss, gradients and statistics. None: where that takes less than 10 seconds, by estimate.
        progress: Whether stderr says what is going on meanwhile.

    Raises MBC330 to MBC333, MBC337, MBC167, MBC303 for everything in the model that mbc does not have, and what
    compiling raises.
    """
    from mbc.pytorch.trainer import make_trainer

    return make_trainer(
        model, example,
        loss=loss, optimizer=optimizer, targets=targets, clip_norm=clip_norm, memory=memory, precision=precision,
        device=device, seed=seed, measure_for=measure_for, check=check, progress=progress,
    )  # fmt: skip
