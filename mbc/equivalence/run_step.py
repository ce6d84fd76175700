"""One training step and one inference pass from a network's initial states, with all of their results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.graph import Role, TrainingGraph
from mbc.ir.types import DType, Precision
from mbc.ops import KINDS
from mbc.plan.model import Plan
from mbc.runtime.arrays import classes_of
from mbc.runtime.module import Module

Array = NDArray[Any]

_MOST_ATTEMPTS = 32  # more halvings than there are between the first and the smallest loss scale of fp16


class Part(StrEnum):
    """The part of a step that a tensor belongs to."""

    LOSS = "loss"
    OUTPUT = "output"
    GRADIENT = "gradient"
    STATISTIC = "statistic"


@dataclass(frozen=True)
class Outcome:
    """Loss, inference outputs, gradients of all parameters, and statistics after the step, in canonical layout.

    `attempts` is the number of steps until one counted; only fp16 needs more than one, to find its loss scale.
    """

    device: str
    attempts: int
    tensors: Mapping[tuple[Part, str], Array]


def run_step(
    subject: Plan | Path,
    device: str,
    inputs: Mapping[str, Array],
    seed: int,
    attempts: int = 1,
    weight_noise: float = 0.0,
) -> Outcome:
    """Return the results of `forward` and then of one training step.

    The optimizer must be sgd with momentum and without weight decay: the gradient is the value that a step adds to a
    momentum of zero.

    Args:
        subject: A plan, or the folder of a package.
        device: `cpu` or `cuda`.
        inputs: Inputs and targets by name.
        seed: The seed of the module.
        attempts: The step has at least this number, so that dropout draws the same numbers in two modules.
        weight_noise: The relative random error of all parameters.

    Raises:
        MbcError: MBC197 if no step counts.
    """
    with Module(subject, seed=seed, device=device) as net:
        graph = net.plan.graph
        if weight_noise:
            _perturb(net, weight_noise, seed)
        start = {name: net.state(name) for name in net.states}
        outputs = net.forward(*(inputs[name] for name in graph.infer_inputs))
        arrays = outputs if isinstance(outputs, tuple) else (outputs,)
        tensors = {(Part.OUTPUT, name): array for name, array in zip(graph.outputs, arrays, strict=True)}
        attempt = 0
        while True:
            attempt += 1
            before = net.control["updates"]
            # With a learning rate of zero the parameters stay and only the momentum changes.
            loss = float(net.step(lr=0.0, **{name: inputs[name] for name in graph.inputs}))
            counts = net.control["updates"] > before
            if counts and attempt >= attempts:
                break
            if not counts and (graph.precision is not Precision.FP16 or attempt >= _MOST_ATTEMPTS):
                raise MbcError(
                    "MBC197",
                    f"the loss of the first step is {loss}, so there is nothing to compare",
                    "choose another --seed, or a precision with a wider range",
                )
            for name, array in start.items():
                net.set_state(name, array)
        tensors[Part.LOSS, "loss"] = np.float64(loss).reshape(1)
        for state in graph.states:
            role = graph.values[state.value].role
            if role is Role.STATISTIC:
                tensors[Part.STATISTIC, state.value] = net.state(state.value)
            elif role is Role.PARAMETER and f"{state.value}.momentum" in net.states:
                tensors[Part.GRADIENT, state.value] = net.state(f"{state.value}.momentum")
        return Outcome(net.device, attempt, tensors)


def _perturb(net: Module, noise: float, seed: int) -> None:
    random = np.random.default_rng((seed, 1))
    for state in net.plan.graph.states:
        if net.plan.graph.values[state.value].role is Role.PARAMETER:
            exact = net.state(state.value)
            net.set_state(state.value, exact * (1 + noise * random.standard_normal(exact.shape)))


def random_inputs(graph: TrainingGraph, seed: int, draw: int) -> dict[str, Array]:
    """Return inputs of a step by name.

    Inputs are standard normal numbers, probabilities from 0 to 1, bytes, or class numbers that all outputs have.
    """
    random = np.random.default_rng((seed, draw))
    arrays: dict[str, Array] = {}
    copied = {op.outputs[0]: op.inputs[0] for op in graph.train if op.kind == "cast"}
    targets = [op.inputs[i] for op in graph.train for i in KINDS[op.kind].probabilities]
    probable = {copied.get(value, value) for value in targets}
    for name in graph.inputs:
        tensor = graph.values[name].type
        if tensor.dtype is DType.INT32:
            arrays[name] = random.integers(0, classes_of(graph, name) or 2, tensor.shape, np.int32)
        elif tensor.dtype is DType.UINT8:
            arrays[name] = random.integers(0, 256, tensor.shape, np.uint8)
        elif name in probable:
            arrays[name] = random.random(tensor.shape, np.float32)
        else:
            arrays[name] = random.standard_normal(tensor.shape).astype(np.float32)
    return arrays


def distance(computed: Array, reference: Array) -> float:
    """Return |computed - reference| / |reference|.

    The distance is infinite if an array is not finite, or if only the reference is zero everywhere.
    """
    exact = np.asarray(reference, np.float64)
    with np.errstate(invalid="ignore"):
        apart = float(np.linalg.norm(np.asarray(computed, np.float64) - exact))
    norm = float(np.linalg.norm(exact))
    if not (math.isfinite(apart) and math.isfinite(norm)):
        return math.inf
    return apart / norm if norm else (math.inf if apart else 0.0)


def finite(arrays: Sequence[Array]) -> bool:
    """Return whether all elements of all arrays are finite."""
    return all(bool(np.isfinite(array).all()) for array in arrays)
