"""Gradients of a step of an imported network beside torch's own, by the rule of networks in `gradients.py`: the median
of errors over parameters, the middle one of several draws of inputs, is at most twice torch fp32's, both against
torch in float64.

The network is trained as it was imported, on the interpreter, with as many rows as give every batch norm enough values
a channel. What draws random numbers (dropout, stochastic depth) is set to drop nothing: mbc's draws are not torch's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from gradients import DRAWS, NORM_VALUES, TIMES_TORCH
from modules import Job, errors, median, random_inputs, with_full_norms

from mbc.interchange.importing import ImportedModel
from mbc.ir.graph import TrainingGraph
from mbc.ir.transforms.training_step import differentiate
from mbc.ops import KINDS
from mbc.ops.base import Array, Call
from mbc.source import Source
from tests.ir.execution import new_control

_UPDATES = ("sgd_update", "adamw_update")
_DROPPING = ("Dropout", "Dropout2d", "DropPath", "StochasticDepth")


def drop_nothing(model: Any) -> bool:
    """Set every probability of dropping to 0; returns whether there was any other."""
    changed = False
    for module in model.modules():
        name = "drop_prob" if hasattr(module, "drop_prob") else "p"
        if type(module).__name__ in _DROPPING and getattr(module, name):
            setattr(module, name, 0.0)
            changed = True
    return changed


def compare(model: Any, made: ImportedModel) -> dict[str, Any]:
    """Errors of gradients, mbc's and torch's, of a model that drops nothing and was imported as `made`."""
    job = with_full_norms(Job("imported", Source("imported", made.source)), NORM_VALUES)
    lowered = job.lowered()
    graph = differentiate(lowered.network, lowered.optimizer, lowered.precision)
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for draw in range(DRAWS):
        inputs = dict(zip(graph.inputs, random_inputs(graph, draw), strict=True))
        exact, single = (_of_torch(model, made, graph, inputs, precision) for precision in ("float64", "float32"))
        found = _of_mbc(graph, made, inputs)
        if missing := exact.keys() - found.keys():
            raise RuntimeError(f"mbc has no gradient of {', '.join(sorted(missing))}")
        ours.append(errors(found, exact))
        theirs.append(errors(single, exact))
    error, torchs = (median(median(draw.values()) for draw in draws) for draws in (ours, theirs))
    return {
        "gradients": error <= TIMES_TORCH * torchs,
        "gradient_error": error,
        "torch_gradient_error": torchs,
        "worst_gradient_error": max(max(draw.values()) for draw in ours),
        "torch_worst_gradient_error": max(max(draw.values()) for draw in theirs),
        "rows": graph.batch,
    }


def _of_mbc(graph: TrainingGraph, made: ImportedModel, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Gradients by state, in fp32; each value is forgotten after its last use."""
    operations = [op for op in graph.train if op.kind not in _UPDATES]
    wanted = {op.inputs[0]: op.inputs[1] for op in graph.train if op.kind in _UPDATES}
    last = {value: number for number, op in enumerate(operations) for value in op.inputs}
    last |= dict.fromkeys(wanted.values(), len(operations))
    env: dict[str, Array] = {"control": new_control(), **made.network.arrays, **inputs}
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
    model: Any, made: ImportedModel, graph: TrainingGraph, inputs: Mapping[str, Array], precision: str
) -> dict[str, Array]:
    """Gradients by the names and in the shapes of mbc's states, those left out that torch has none for."""
    import torch  # pyright: ignore[reportMissingImports]

    dtype = getattr(torch, precision)
    own = copy.deepcopy(model).to(dtype).train()
    images = [torch.from_numpy(inputs[name]).to(dtype) for name, _ in zip(inputs, made.network.inputs, strict=False)]
    targets = [torch.from_numpy(array).long() for array in list(inputs.values())[len(images) :]]
    given = own(*images)
    outputs = list(given.values()) if isinstance(given, dict) else [given]
    losses = [torch.nn.functional.cross_entropy(o, t) for o, t in zip(outputs, targets, strict=True)]
    torch.stack(losses).sum().backward()
    states = {key.name: key.state for key in made.network.keys}
    return {
        state: parameter.grad.to(torch.float64).numpy().reshape(graph.values[state].type.shape)
        for name, parameter in own.named_parameters()
        if parameter.grad is not None and (state := states[name])
    }
