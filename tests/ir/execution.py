"""A plain evaluator of a training graph, which executes every operation once, on whole arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from mbc.ir.control import CONTROL_BYTES
from mbc.ir.graph import Operation, Role, TrainingGraph
from mbc.ir.types import DType, Precision, TensorType
from mbc.ops import KINDS
from mbc.ops.base import Array, Call
from mbc.ops.control_record import control_record

NUMPY = {DType.FP64: np.float64, DType.INT32: np.int32, DType.UINT8: np.uint8}


def numpy_type(dtype: DType) -> type:
    return NUMPY.get(dtype, np.float32)


def new_control(step: int = 0, seed: int = 0, learning_rate: float = 0.1, loss_scale: float = 1.0) -> Array:
    block = np.zeros(CONTROL_BYTES, np.uint8)
    record = control_record(block)
    record["step"], record["seed"], record["global_seed"] = step, seed, seed
    record["learning_rate"], record["loss_scale"] = learning_rate, loss_scale
    return block


def draw(graph: TrainingGraph, rng: np.random.Generator, classes: int = 3) -> dict[str, Array]:
    """Return random inputs and states. Variances are positive; other values are distinct and not near zero."""
    initial: dict[str, Array] = {}
    for value in graph.values.values():
        if value.role in (Role.INTERMEDIATE, Role.CONTROL):
            continue
        shape, count = value.type.shape, value.type.elements
        if value.type.dtype is DType.INT32:
            initial[value.name] = rng.integers(0, classes, shape, np.int32)
        elif value.type.dtype is DType.UINT8:
            initial[value.name] = rng.integers(0, 256, shape, np.uint8)
        elif value.role in (Role.STATISTIC, Role.OPTIMIZER):
            initial[value.name] = rng.uniform(0.5, 1.5, shape)
        else:
            # No two values are closer than the finite differences' step, so that no kink is between them.
            spread = (rng.permutation(count) - count / 2 + 0.25) * (3 / count)
            initial[value.name] = spread.reshape(shape)
        initial[value.name] = initial[value.name].astype(numpy_type(value.type.dtype))
    return initial


def execute(
    operations: Iterable[Operation],
    types: Mapping[str, TensorType],
    start: Mapping[str, Array],
    batch: int,
    precision: Precision = Precision.FP64,
) -> dict[str, Array]:
    """Return all values after `operations`, and assert the shape and type of each."""
    env = dict(start)
    for op in operations:
        outputs = tuple(types[v] for v in op.outputs)
        evaluate = KINDS[op.kind].evaluate
        assert evaluate is not None, op
        before = [env[v].copy() for v in op.inputs]
        results = evaluate(op.attributes, [env[v] for v in op.inputs], Call(outputs, 0, batch, precision))
        for name, array, kind in zip(op.outputs, results, outputs, strict=True):
            assert array.shape == kind.shape, (op, array.shape, kind)
            assert array.dtype == numpy_type(kind.dtype), (op, array.dtype, kind)
            env[name] = array
        for name, array in zip(op.inputs, before, strict=True):
            assert np.array_equal(env[name], array, equal_nan=True), f"{op.name} changed its operand {name}"
    return env


def types_of(graph: TrainingGraph) -> dict[str, TensorType]:
    return {name: value.type for name, value in graph.values.items()}


def step(graph: TrainingGraph, start: Mapping[str, Array], control: Array | None = None) -> dict[str, Array]:
    """Return all values after one training step."""
    env = dict(start)
    env["control"] = new_control() if control is None else control
    return execute(graph.train, types_of(graph), env, graph.batch, graph.precision)


def parameter_gradients(graph: TrainingGraph, env: Mapping[str, Array]) -> dict[str, Array]:
    """Return the gradient of every trained parameter, by its name."""
    return {op.inputs[0]: env[op.inputs[1]] for op in graph.train if op.kind in ("sgd_update", "adamw_update")}


def normalised(ours: Array, reference: Array) -> float:
    """Return the relative L2 distance."""
    return float(np.linalg.norm(ours - reference) / max(np.linalg.norm(reference), 1e-30))
