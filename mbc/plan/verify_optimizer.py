"""The check of the optimizer of a graph against the operations that update its states. Used by the verifier only.

A step runs the operations. Users read `graph.optimizer`, which also says how many mini-batches a step has. This file
shares no code with the pass that makes the operations from the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, NoReturn

from mbc.errors import MbcError
from mbc.ir.averages import average_name
from mbc.ir.control import INITIAL_LOSS_SCALE
from mbc.ir.graph import NO_OPTIMIZER, Operation, Optimizer, Role, TrainingGraph, Value
from mbc.ir.kept_gradients import gradients_of, has_gradient
from mbc.ir.metrics import MEAN_SQUARE, PART_SQUARE, value_of
from mbc.ir.parameter_groups import NORM_AND_BIAS, is_trained, settings_of
from mbc.ir.types import DType, Precision
from mbc.plan.accumulation import ACCUMULATE, Accumulation

_REMEDY = "mbc never writes such a plan: compile the source again"
# Fields that each kind of optimizer reads; the other fields keep their defaults.
_MOMENTUM, _ADAM = {"momentum", "nesterov"}, {"beta1", "beta2", "eps"}
_READ = {
    "sgd": _MOMENTUM,
    "adamw": _ADAM,
    "lars": _MOMENTUM | {"trust", "eps"},
    "lamb": _ADAM,
    NO_OPTIMIZER: set[str](),
}
_OF_SOME_KINDS = set[str]().union(*_READ.values())
_WHOLE = {"sgd_update_part": "sgd_update", "adamw_update_part": "adamw_update"}
_UPDATES = frozenset({"sgd_update", "adamw_update", "lars_update", "lamb_update", *_WHOLE})
_RATIOS = frozenset({"lars_ratio", "lamb_ratio"})
_READ_GRADIENTS = frozenset({"sgd_update", "adamw_update", "lars_update"}) | _RATIOS


def verify_optimizer(graph: TrainingGraph) -> None:
    """Raise MBC137 unless the operations of the step do what every field of `graph.optimizer` says."""
    optimizer = graph.optimizer
    if optimizer.kind not in _READ:
        _fail(f"there is no optimizer '{optimizer.kind}'")
    if optimizer.no_decay not in ("", NORM_AND_BIAS):
        _fail(f"its no_decay is '{optimizer.no_decay}'")
    for field in fields(Optimizer):
        unread = field.name in _OF_SOME_KINDS - _READ[optimizer.kind]
        if unread and getattr(optimizer, field.name) != field.default:
            _fail(f"{optimizer.kind} does not read {field.name}, which is {getattr(optimizer, field.name)}")
    updates = {op.inputs[0]: op for op in graph.train if op.kind in _UPDATES}
    for op in graph.train:
        if op.kind in _UPDATES | _RATIOS:
            _check_update(graph, op)
    for name, value in graph.values.items():
        if name in updates and not is_trained(optimizer, value):
            _fail(f"'{name}' is updated, but is not a trained parameter", updates[name])
    if optimizer.kind == NO_OPTIMIZER:
        _check_kept_gradients(graph)
    else:
        if optimizer.input_gradients:
            _fail(f"input_gradients is true, but the step has the optimizer {optimizer.kind}")
        _check_guard(graph)
        _check_accumulation(graph, updates.values())
    _check_averages(graph)
    _check_noise_scale(graph)
    _check_loss_scale(graph)


def _check_update(graph: TrainingGraph, op: Operation) -> None:
    optimizer, value = graph.optimizer, graph.values[op.inputs[0]]
    own = settings_of(optimizer, value)
    adapts = optimizer.kind in ("lars", "lamb") and own.weight_decay > 0
    adam = optimizer.kind in ("adamw", "lamb")
    update = f"{optimizer.kind}_update" if adapts else "adamw_update" if adam else "sgd_update"
    ratio = f"{optimizer.kind}_ratio" if adapts else None
    if _WHOLE.get(op.kind, op.kind) not in (update, ratio):
        _fail(f"{optimizer.kind} updates '{value.name}' by {update}, not by {op.kind}", op)
    wanted: dict[str, Any] = {"weight_decay": own.weight_decay, "clip_value": optimizer.clip_value}
    if op.kind == "lars_ratio":
        wanted |= {"trust": optimizer.trust, "eps": optimizer.eps}
    else:
        wanted |= {"rate": own.rate} | {name: getattr(optimizer, name) for name in (_ADAM if adam else _MOMENTUM)}
    _compare(op, wanted)


def _check_kept_gradients(graph: TrainingGraph) -> None:
    """Check that a step without an optimizer adds each gradient to the state of its parameter, and updates nothing."""
    kept = gradients_of(graph)
    for op in graph.train:
        if op.kind in _UPDATES | _RATIOS | {"guard", "ema_update"}:
            _fail("a step without an optimizer has no update", op)
    sums = {op.inputs[0]: op for op in graph.train if op.kind == ACCUMULATE}
    for name in sums.keys() ^ set(kept.values()):
        _fail(f"'{name}' is not a gradient that the step keeps", sums.get(name))
    for parameter, state in kept.items():
        value = graph.values.get(parameter)
        if value is None or not has_gradient(graph.optimizer, value):
            _fail(f"'{state}' is the gradient of no trained parameter or input", sums[state])


def _compare(op: Operation, wanted: dict[str, Any]) -> None:
    for field in fields(op.attributes):
        has = getattr(op.attributes, field.name)
        if has != wanted[field.name]:
            _fail(f"its {field.name} is {has}, the optimizer's is {wanted[field.name]}", op)


def _check_guard(graph: TrainingGraph) -> None:
    """Check that one guard with the optimizer's settings reads the loss and, where it must, all gradients."""
    optimizer = graph.optimizer
    guards = [op for op in graph.train if op.kind == "guard"]
    if len(guards) != 1:
        _fail(f"a step has one guard, not {len(guards)}")
    guard = guards[0]
    _compare(guard, {"clip_norm": optimizer.clip_norm, "accumulate": optimizer.accumulate})
    _, total, *seen = guard.inputs
    if total != graph.loss:
        _fail(f"it reads '{total}' as the loss, but the loss is '{graph.loss}'", guard)
    if not (optimizer.clip_norm or graph.precision is Precision.FP16):
        return
    for op in graph.train:
        # For gradients in parts, the guard reads their norms (`mbc.plan.verify_ranks`).
        if op.kind in _READ_GRADIENTS and op.inputs[1] not in seen:
            _fail(f"it does not read '{op.inputs[1]}', the gradient that updates '{op.inputs[0]}'", guard)


def _check_accumulation(graph: TrainingGraph, updates: Iterable[Operation]) -> None:
    """Check that every update needs sums over mini-batches if a step has several, and that none does if it has one."""
    sums = [op for op in graph.train if op.kind == ACCUMULATE]
    if graph.optimizer.accumulate < 1:
        _fail(f"a step has {graph.optimizer.accumulate} mini-batches")
    if graph.optimizer.accumulate == 1:
        if sums:
            _fail("a step of one mini-batch must not accumulate", sums[0])
        return
    late = Accumulation(graph).late
    for op in updates:
        if op.name not in late:
            _fail(f"a step has {graph.optimizer.accumulate} mini-batches, but it needs no sum over them", op)


def _check_averages(graph: TrainingGraph) -> None:
    """Check that each weight and statistic that a step changes has a moving average if the optimizer keeps averages."""
    decay, changed = graph.optimizer.ema, {old for old, _ in graph.updates}
    averages = {op.inputs[0]: op for op in graph.train if op.kind == "ema_update"}
    for op in averages.values():
        _compare(op, {"decay": decay})
    names = {average_name(state.value) for state in graph.states}
    weights = {
        state.value
        for state in graph.states
        if state.value not in names and graph.values[state.value].role in (Role.PARAMETER, Role.STATISTIC)
    }
    wanted = {average_name(weight) for weight in weights & changed} if decay else set[str]()
    for name in sorted(wanted ^ averages.keys()):
        _fail(f"with an ema of {decay}, '{name}' {'is not updated' if name in wanted else 'averages no weight'}")
    for name, op in averages.items():
        weight = next(weight for weight in weights if average_name(weight) == name)
        if op.inputs[1] != dict(graph.updates)[weight]:
            _fail(f"it averages '{op.inputs[1]}', not the next version of '{weight}'", op)


def _check_noise_scale(graph: TrainingGraph) -> None:
    squares = {value_of(PART_SQUARE), value_of(MEAN_SQUARE)}
    results = {output for op in graph.train for output in op.outputs}
    if graph.optimizer.noise_scale != (squares <= results):
        _fail(f"its noise_scale is {graph.optimizer.noise_scale}, but the step does the opposite")


def _check_loss_scale(graph: TrainingGraph) -> None:
    wanted = INITIAL_LOSS_SCALE if graph.precision is Precision.FP16 else 1.0
    for state in graph.states:
        if graph.values[state.value].role is Role.CONTROL and state.initializer.value != wanted:
            _fail(f"in {graph.precision} the loss scale starts at {wanted}, not at {state.initializer.value}")


def check_precision(graph: TrainingGraph) -> None:
    """Check that the values have the types of the graph's precision.

    Raises:
        MbcError: MBC138 otherwise.
    """
    precision = graph.precision
    for value in graph.values.values():
        if value.type.dtype in (DType.INT32, DType.UINT8):
            continue
        kept = value.role.persistent or value.role is Role.INPUT
        allowed = (precision.master,) if kept else (precision.working, precision.master)
        if value.type.dtype not in allowed:
            raise MbcError("MBC138", _of_type(value, precision), _REMEDY, value.span)


def _of_type(value: Value, precision: Precision) -> str:
    return f"the plan is of precision {precision}, but '{value.name}' is {value.type}"


def _fail(why: str, op: Operation | None = None) -> NoReturn:
    where = "the optimizer of the plan" if op is None else f"operation '{op.name}'"
    raise MbcError("MBC137", f"{where}: {why}", _REMEDY, None if op is None else op.span)
