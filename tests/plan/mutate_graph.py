"""Small random changes to a plan's statements about its network, optimizer, target and source."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from mbc.hardware.spec import device_specs
from mbc.ir.graph import Attributes, Operation, Optimizer, ParameterGroup, State, TrainingGraph
from mbc.ir.types import Precision
from mbc.plan.model import Plan
from mbc.source import Source

_TEXTS = {
    "kind": ("sgd", "adamw", "lars", "lamb", "none"),
    "no_decay": ("", "norm_and_bias", "everything"),
    "frozen": ((), ("*",), ("conv*",), ("*.bias",), ("nothing*",)),
    "groups": ((), (ParameterGroup("*", 10.0),), (ParameterGroup("conv*", None, 0.0),), (ParameterGroup("no*", 2.0),)),
}


def _other(value: Any, rng: random.Random) -> Any:
    """Return another value of the type of `value`."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return max(0, value + rng.choice([-1, 1, 1, 2]))
    if isinstance(value, float):
        return rng.choice([0.0, 0.5, 0.9, 1.0, 2.0, value * 1.5, value * 0.999])
    if isinstance(value, str):
        return rng.choice(["", "none", value + "x"])
    if isinstance(value, tuple) and value:
        i = rng.randrange(len(value))
        return (*value[:i], _other(value[i], rng), *value[i + 1 :])
    return value


def change_optimizer(plan: Plan, rng: random.Random) -> Plan:
    """Change one field of the optimizer."""
    field = rng.choice(fields(Optimizer)).name
    value = rng.choice(_TEXTS[field]) if field in _TEXTS else _other(getattr(plan.graph.optimizer, field), rng)
    return _with(plan, optimizer=replace(plan.graph.optimizer, **{field: value}))


def change_metrics(plan: Plan, rng: random.Random) -> Plan:
    """Change the metrics: their values, number or order."""
    metrics = list(plan.graph.metrics)
    way = rng.randrange(3)
    if way == 0 and metrics:
        metrics.pop(rng.randrange(len(metrics)))
    elif way == 1 and metrics:
        metrics[rng.randrange(len(metrics))] = rng.choice([*plan.graph.values])
    else:
        metrics.insert(rng.randrange(len(metrics) + 1), rng.choice([*plan.graph.values]))
    return _with(plan, metrics=tuple(metrics))


def change_target(plan: Plan, rng: random.Random) -> Plan:
    spec, target = rng.choice(list(device_specs().values())), plan.target
    changes = (
        {"architecture": spec.architecture},
        {"multiprocessors": spec.multiprocessors},
        {"multiprocessors": max(1, target.multiprocessors + rng.choice([-1, 1]))},
        {"gpu": spec.name},
        {"gpu": spec.name, "architecture": spec.architecture, "multiprocessors": spec.multiprocessors},
    )
    return replace(plan, target=replace(target, **rng.choice(changes)))


def change_precision(plan: Plan, rng: random.Random) -> Plan:
    return _with(plan, precision=rng.choice(list(Precision)))


def change_source(plan: Plan, rng: random.Random) -> Plan:
    """Change one number or word of the source, and let all places refer to the changed source."""
    span = next(op.span for op in plan.graph.train if op.span is not None)
    text = span.source.text
    words = list(re.finditer(r"\d+|relu|bn|maxpool|momentum|true", text))
    word = rng.choice(words)
    was = word.group()
    new = str(int(was) + rng.choice([1, 2])) if was.isdigit() else rng.choice(["gelu", "sigmoid", "relu", "false"])
    return of_source(plan, Source(span.source.name, text[: word.start()] + new + text[word.end() :]))


def change_asked(plan: Plan, rng: random.Random) -> Plan:
    """Change the settings beside the source."""
    setting = rng.choice(
        [
            ("batch", "3"),
            ("classes", "7"),
            ("train.accumulate", "3"),
            ("train.ema", "0.5"),
            ("train.clip_norm", "2"),
            ("train.precision", "tf32"),
            ("no.such", "1"),
        ]
    )
    return replace(plan, settings=(*plan.settings, setting))


def change_attribute(plan: Plan, rng: random.Random) -> Plan:
    """Change one setting of one operation."""

    def change(op: Operation) -> Operation:
        names = [f.name for f in fields(op.attributes)]
        if not names:
            return op
        name = rng.choice(names)
        try:
            attributes: Attributes = replace(op.attributes, **{name: _other(getattr(op.attributes, name), rng)})
        except (TypeError, ValueError, AssertionError):
            return op
        return replace(op, attributes=attributes)

    title, operations = _program(plan, rng)
    having = [i for i, op in enumerate(operations) if fields(op.attributes)]
    i = rng.choice(having or [0])
    return _with(plan, **{title: (*operations[:i], change(operations[i]), *operations[i + 1 :])})


def change_operand(plan: Plan, rng: random.Random) -> Plan:
    """Let one operation read another value."""
    title, operations = _program(plan, rng)
    i = rng.randrange(len(operations))
    inputs = list(operations[i].inputs)
    inputs[rng.randrange(len(inputs))] = rng.choice([*plan.graph.values])
    return _with(plan, **{title: (*operations[:i], replace(operations[i], inputs=tuple(inputs)), *operations[i + 1 :])})


def change_results(plan: Plan, rng: random.Random) -> Plan:
    """Change the loss or an output."""
    graph, names = plan.graph, [*plan.graph.values]
    if rng.random() < 0.4:
        return _with(plan, loss=rng.choice(names))
    field = rng.choice(["outputs", "infer_outputs", "inputs", "infer_inputs"])
    values = list(getattr(graph, field))
    values[rng.randrange(len(values))] = rng.choice(names)
    return _with(plan, **{field: tuple(values)})


def change_start(plan: Plan, rng: random.Random) -> Plan:
    """Change the initial value of a state, or the order of states."""
    states = list(plan.graph.states)
    if rng.random() < 0.3:
        rng.shuffle(states)
        return _with(plan, states=tuple(states))
    i = rng.randrange(len(states))
    start = states[i].initializer
    changed = rng.choice([replace(start, value=_other(start.value, rng)), replace(start, kind="normal", value=0.1)])
    states[i] = State(states[i].value, changed)
    return _with(plan, states=tuple(states))


def change_update(plan: Plan, rng: random.Random) -> Plan:
    """Let a state keep its value, or take the new value of another state."""
    updates = list(plan.graph.updates)
    i = rng.randrange(len(updates))
    if rng.random() < 0.5:
        updates.pop(i)
    else:
        updates[i] = (updates[i][0], rng.choice(updates)[1])
    return _with(plan, updates=tuple(updates))


def _program(plan: Plan, rng: random.Random) -> tuple[str, tuple[Operation, ...]]:
    title = "train" if rng.random() < 0.8 else "infer"
    return title, getattr(plan.graph, title)


def _with(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, graph=replace(plan.graph, **changes))


def of_source(plan: Plan, source: Source) -> Plan:
    """Return the plan with all its places moved to another source."""

    def moved(item: Any) -> Any:
        return item if item.span is None else replace(item, span=replace(item.span, source=source))

    graph: TrainingGraph = plan.graph
    values = {name: moved(value) for name, value in graph.values.items()}
    return _with(plan, values=values, train=tuple(map(moved, graph.train)), infer=tuple(map(moved, graph.infer)))


GRAPH_MUTATIONS: dict[str, Callable[[Plan, random.Random], Plan]] = {
    f.__name__: f
    for f in (
        change_optimizer,
        change_metrics,
        change_target,
        change_precision,
        change_source,
        change_asked,
        change_attribute,
        change_operand,
        change_results,
        change_start,
        change_update,
    )
}
