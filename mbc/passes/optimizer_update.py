"""The end of a training step: updates of all parameters by the optimizer, and moving averages.

`current` has the value of each changed state at the present point of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mbc.ir.averages import average_name
from mbc.ir.graph import Attributes, Initializer, Optimizer, Role, State, Value
from mbc.ir.parameter_groups import settings_of
from mbc.ops.layerwise import LarsRatio
from mbc.ops.update import AdamW, Ema, Sgd
from mbc.passes.graph_builder import GraphBuilder

_ADAM = ("adamw", "lamb")  # optimizers with two moments


def updated(
    builder: GraphBuilder, optimizer: Optimizer, gradients: Mapping[str, str], current: dict[str, str]
) -> list[State]:
    """Append the updates of all parameters, and return the states of the optimizer."""
    # All ratios precede all updates, so that one launch can compute them.
    for step in (_adapt, _update):
        for parameter, gradient in gradients.items():
            step(builder, optimizer, parameter, gradient, current)
    memories = (v for parameter in gradients for v in _memory(builder, optimizer, parameter))
    return [State(v, Initializer("constant")) for v in memories]


def _memory(builder: GraphBuilder, optimizer: Optimizer, parameter: str) -> tuple[str, ...]:
    """Return the states of the optimizer for a parameter, which the first call declares."""
    value = builder.values[parameter]
    suffixes = ("m", "v") if optimizer.kind in _ADAM else ("momentum",) if optimizer.momentum else ()
    names = tuple(f"{parameter}.{suffix}" for suffix in suffixes)
    for name in names:
        if name not in builder.values:
            builder.declare(name, value.type, Role.OPTIMIZER, span=value.span)
    return names


def _adapts(optimizer: Optimizer, value: Value) -> bool:
    """Return whether LARS or LAMB scales the step of a parameter by a ratio, which needs weight decay."""
    return optimizer.kind in ("lars", "lamb") and settings_of(optimizer, value).weight_decay > 0


def _ratio_of(parameter: str) -> str:
    return f"{parameter}.ratio"


def _adapt(builder: GraphBuilder, optimizer: Optimizer, parameter: str, gradient: str, current: dict[str, str]) -> None:
    """Append the ratio that scales the step of a parameter, if there is one."""
    value, guarded = builder.values[parameter], _control(builder, current)
    if not _adapts(optimizer, value):
        return
    ratio, inputs = _ratio_of(parameter), (parameter, gradient, guarded)
    if optimizer.kind == "lars":
        decay = settings_of(optimizer, value).weight_decay
        settings = LarsRatio(optimizer.trust, optimizer.eps, decay, optimizer.clip_value)
        builder.emit("lars_ratio", settings, inputs, ratio, (ratio,), value.span)
        return
    memory = _memory(builder, optimizer, parameter)
    outputs = (*(f"next.{v}" for v in memory), ratio)
    attributes = _attributes(optimizer, value)
    *moved, _ = builder.emit("lamb_ratio", attributes, (*inputs, *memory), ratio, outputs, value.span)
    current.update(zip(memory, moved, strict=True))


def _update(
    builder: GraphBuilder, optimizer: Optimizer, parameter: str, gradient: str, current: dict[str, str]
) -> None:
    """Append the update of one parameter."""
    value, guarded = builder.values[parameter], _control(builder, current)
    adapts, adam, memory = _adapts(optimizer, value), optimizer.kind in _ADAM, _memory(builder, optimizer, parameter)
    inputs: tuple[str, ...] = (parameter, gradient, guarded, *memory)
    changed: tuple[str, ...] = (parameter, *memory)
    kind = "adamw_update" if adam else "sgd_update"  # without weight decay, LARS and LAMB equal these
    if adapts and adam:
        kind, changed = "lamb_update", (parameter,)
        inputs = (parameter, guarded, *(current[v] for v in memory), _ratio_of(parameter))
    elif adapts:
        kind, inputs = "lars_update", (parameter, gradient, guarded, _ratio_of(parameter), *memory)
    names = [f"next.{v}" for v in changed]
    attributes = _attributes(optimizer, value)
    results = builder.emit(kind, attributes, inputs, f"{parameter}.update", names, value.span)
    current.update(zip(changed, results, strict=True))


def _attributes(optimizer: Optimizer, value: Value) -> Attributes:
    """Return the attributes of a parameter's update."""
    o, own = optimizer, settings_of(optimizer, value)
    if o.kind in _ADAM:
        return AdamW(o.beta1, o.beta2, o.eps, own.weight_decay, own.rate, o.clip_value)
    return Sgd(o.momentum, o.nesterov, own.weight_decay, own.rate, o.clip_value)


def _control(builder: GraphBuilder, current: dict[str, str]) -> str:
    """Return the control block that `guard` computes."""
    return next(new for old, new in current.items() if builder.values[old].role is Role.CONTROL)


def averages(
    builder: GraphBuilder, optimizer: Optimizer, states: Sequence[State], guarded: str, current: dict[str, str]
) -> list[State]:
    """Append the moving averages of all `states` that the step changes, and return their states.

    An average starts with the initial values of its state.
    """
    kept: list[State] = []
    for state in states:
        weight, value = state.value, builder.values[state.value]
        if not optimizer.ema or weight not in current:
            continue
        # An average of statistics belongs to this rank's rows, as the statistics do.
        role = Role.STATISTIC if value.role is Role.STATISTIC else Role.OPTIMIZER
        average = builder.declare(average_name(weight), value.type, role, span=value.span)
        inputs = (average, current[weight], guarded)
        (current[average],) = builder.emit(
            "ema_update", Ema(optimizer.ema), inputs, f"{average}.update", (f"next.{average}",), value.span
        )
        kept.append(State(average, state.initializer))
    return kept
