"""Gradients of a step of an imported network against torch's in float64, with the limits of `gradients.py`.

In fp64 every parameter is within 1e-8. In fp32 the median of errors over parameters, the middle one of several draws of
inputs, is at most twice torch's own in float32.

The network is trained as it was imported, on the interpreter, with enough rows that every batch norm has enough values
for each channel. Layers that draw random numbers (dropout, stochastic depth) are set to drop nothing, because mbc and
torch draw different numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from exactness import ExactSixths
from gradients import DRAWS, EXACT_LIMIT, NORM_VALUES, TIMES_TORCH
from modules import Job, errors, median, random_inputs, with_full_norms

from mbc.interchange.importing import ImportedModel
from mbc.ir.graph import TrainingGraph
from mbc.ops import KINDS
from mbc.ops.base import Array, Call
from mbc.passes.training_step import differentiate
from mbc.source import Source
from tests.ir.execution import new_control, numpy_type

_UPDATES = ("sgd_update", "adamw_update")
_DROPPING = ("Dropout", "Dropout2d", "Dropout3d", "DropPath", "StochasticDepth")


def drop_nothing(model: Any) -> bool:
    """Set every probability of dropping to 0. Return whether any was not 0."""
    result = _dropping(model)
    for module, name in result:
        setattr(module, name, 0.0)
    return bool(result)


def drops(model: Any) -> bool:
    """Return whether a step of the model draws random numbers, as dropout does."""
    return bool(_dropping(model))


def _dropping(model: Any) -> list[tuple[Any, str]]:
    """Return the modules that drop values, each with the name of its probability.

    Modules that call `functional.dropout` have `drop_rate`.
    """
    named = [(m, "drop_prob" if hasattr(m, "drop_prob") else "p") for m in model.modules()]
    result = [(m, name) for m, name in named if type(m).__name__ in _DROPPING and getattr(m, name)]
    return result + [(m, "drop_rate") for m in model.modules() if getattr(m, "drop_rate", 0)]


def single(model: Any, imported_model: ImportedModel) -> dict[str, Any]:
    """Return the fp32 errors of mbc and torch for a model that drops nothing."""
    graph = _graph(imported_model, "fp32")
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for draw in range(DRAWS):
        inputs = _inputs(graph, draw)
        reference = _of_torch(model, imported_model, graph, inputs, "float64")
        ours.append(_errors(_of_mbc(graph, imported_model, inputs), reference))
        theirs.append(_errors(_of_torch(model, imported_model, graph, inputs, "float32"), reference))
    return {
        "gradient_error": median(median(draw.values()) for draw in ours),
        "torch_gradient_error": median(median(draw.values()) for draw in theirs),
        "gradient_errors": [median(draw.values()) for draw in ours],
        "torch_gradient_errors": [median(draw.values()) for draw in theirs],
        "worst_gradient_error": max(max(draw.values()) for draw in ours),
        "torch_worst_gradient_error": max(max(draw.values()) for draw in theirs),
        "rows": graph.batch,
    }


def exact(model: Any, imported_model: ImportedModel) -> dict[str, Any]:
    """Return the largest gradient error of all parameters in fp64."""
    graph = _graph(imported_model, "fp64")
    inputs = _inputs(graph, 0)
    result = _errors(_of_mbc(graph, imported_model, inputs), _of_torch(model, imported_model, graph, inputs, "float64"))
    return {"exact_gradient_error": max(result.values())}


def keeps_single(row: Mapping[str, Any]) -> bool:
    """Return whether the errors in fp32 are within the limit."""
    return row["gradient_error"] <= TIMES_TORCH * row["torch_gradient_error"]


def keeps_exact(row: Mapping[str, Any]) -> bool:
    """Return whether the error in fp64 is within the limit."""
    return row["exact_gradient_error"] <= EXACT_LIMIT


def _graph(imported_model: ImportedModel, precision: str) -> TrainingGraph:
    job = with_full_norms(Job("imported", Source("imported", imported_model.source)), NORM_VALUES)
    lowered = job.with_settings(("train.precision", precision)).lowered()
    return differentiate(lowered.network, lowered.optimizer, lowered.precision)


def _inputs(graph: TrainingGraph, draw: int) -> dict[str, Array]:
    return dict(zip(graph.inputs, random_inputs(graph, draw), strict=True))


def _errors(result: dict[str, Array], reference: dict[str, Array]) -> dict[str, float]:
    if missing := reference.keys() - result.keys():
        raise RuntimeError(f"there is no gradient of {', '.join(sorted(missing))}")
    return errors(result, reference)


def _of_mbc(graph: TrainingGraph, imported_model: ImportedModel, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return mbc's gradients by state. To save memory, each value is dropped after its last use."""
    operations = [op for op in graph.train if op.kind not in _UPDATES]
    wanted = {op.inputs[0]: op.inputs[1] for op in graph.train if op.kind in _UPDATES}
    last = {value: number for number, op in enumerate(operations) for value in op.inputs}
    last |= dict.fromkeys(wanted.values(), len(operations))
    env: dict[str, Array] = {**imported_model.network.arrays, **inputs}
    env = {name: array.astype(numpy_type(graph.values[name].type.dtype)) for name, array in env.items()}
    env["control"] = new_control()
    for number, op in enumerate(operations):
        outputs = tuple(graph.values[v].type for v in op.outputs)
        evaluate = KINDS[op.kind].evaluate
        assert evaluate is not None
        call = Call(outputs, 0, graph.batch, graph.precision)
        env.update(zip(op.outputs, evaluate(op.attributes, [env[v] for v in op.inputs], call), strict=True))
        for value in (*op.inputs, *op.outputs):
            if last.get(value, -1) <= number:
                env.pop(value, None)
    return {state: env[value] for state, value in wanted.items()}


def _of_torch(
    model: Any, imported_model: ImportedModel, graph: TrainingGraph, inputs: Mapping[str, Array], precision: str
) -> dict[str, Array]:
    """Return torch's gradients by the names and in the shapes of mbc's states, for the parameters that have one."""
    dtype = getattr(torch, precision)
    own = copy.deepcopy(model).to(dtype).train()
    images = [
        torch.from_numpy(inputs[name]).to(dtype) for name, _ in zip(inputs, imported_model.network.inputs, strict=False)
    ]
    targets = [torch.from_numpy(array).long() for array in list(inputs.values())[len(images) :]]
    with ExactSixths():
        given = own(*images)
    outputs = list(given.values()) if isinstance(given, dict) else [given]
    losses = [torch.nn.functional.cross_entropy(o, t) for o, t in zip(outputs, targets, strict=True)]
    torch.stack(losses).sum().backward()
    states = {key.name: key.state for key in imported_model.network.keys}
    return {
        state: parameter.grad.to(torch.float64).numpy().reshape(graph.values[state].type.shape)
        for name, parameter in own.named_parameters()
        if parameter.grad is not None and (state := states[name])
    }
