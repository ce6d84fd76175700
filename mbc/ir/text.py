"""Readable text of a graph: one line an operation, in order, without differences from run to run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mbc.ir.graph import (
    NO_OPTIMIZER,
    Initializer,
    Network,
    Operation,
    Optimizer,
    ParameterGroup,
    State,
    TrainingGraph,
    Value,
)
from mbc.ir.optional import written_fields


def network_text(network: Network) -> str:
    """Return the text of the forward graph as written."""
    lines = [f"network {network.name}, batch {network.batch}"]
    lines += _inputs(network.inputs, network.values)
    lines += _states(network.states, network.values)
    lines += _operations(network.operations, network.values)
    lines += [f"  output {name}" for name in network.outputs]
    lines += [f"  loss {weight:g} * {name}" for name, weight in network.losses]
    lines += [
        f"  metric {name} = {' + '.join(f'{weight:g} * {value}' for value, weight in terms)}"
        for name, terms in network.metrics
    ]
    return "\n".join(lines) + "\n"


def training_text(graph: TrainingGraph) -> str:
    """Return the text of both programs: the training step with its updates, and inference."""
    lines = [
        f"training step of {graph.name}, batch {graph.batch}, {graph.precision}, {optimizer_text(graph.optimizer)}"
    ]
    lines += _inputs(graph.inputs, graph.values)
    lines += _states(graph.states, graph.values)
    lines += _operations(graph.train, graph.values)
    lines += [f"  output {name}" for name in graph.outputs]
    lines.append(f"  loss {graph.loss}")
    lines += [f"  metric {name}" for name in graph.metrics]
    lines += [f"  after the step {state} = {value}" for state, value in graph.updates]
    lines.append(f"inference of {graph.name}, from {', '.join(graph.infer_inputs) or 'nothing'}")
    lines += _operations(graph.infer, graph.values)
    lines += [f"  output {name}" for name in graph.infer_outputs]
    return "\n".join(lines) + "\n"


def _inputs(names: Iterable[str], values: Mapping[str, Value]) -> list[str]:
    return [f"  input {name}: {values[name].type}" for name in names]


def _states(states: Iterable[State], values: Mapping[str, Value]) -> list[str]:
    return [
        f"  {values[s.value].role} {s.value}: {values[s.value].type} = {_initializer(s.initializer)}" for s in states
    ]


def _operations(operations: Iterable[Operation], values: Mapping[str, Value]) -> list[str]:
    lines: list[str] = []
    for op in operations:
        outputs = ", ".join(f"{name}: {values[name].type}" for name in op.outputs)
        settings = "".join(
            f"; {f.name} {setting_text(getattr(op.attributes, f.name))}" for f in written_fields(op.attributes)
        )
        label = "" if op.outputs[:1] == (op.name,) else f"  # {op.name}"
        lines.append(f"  {outputs} = {op.kind}({', '.join(op.inputs)}{settings}){label}")
    return lines


def setting_text(setting: object) -> str:
    """Return a setting as the language writes it."""
    if isinstance(setting, bool):
        return str(setting).lower()
    return f"{setting:g}" if isinstance(setting, float) else str(setting)


def _initializer(initializer: Initializer) -> str:
    if initializer.fan_in or initializer.fan_out:
        return f"{initializer.kind}({initializer.fan_in} in, {initializer.fan_out} out)"
    return f"{initializer.kind}({initializer.value:g})"


def optimizer_text(optimizer: Optimizer) -> str:
    """Return the optimizer as a source writes it."""
    adamw, sgd = ("beta1", "beta2", "eps", "weight_decay"), ("momentum", "nesterov", "weight_decay")
    names = {"adamw": adamw, "lamb": adamw, "lars": (*sgd, "trust", "eps"), NO_OPTIMIZER: ()}.get(optimizer.kind, sgd)
    settings = ", ".join(f"{name}={setting_text(getattr(optimizer, name))}" for name in names)
    return ", ".join([f"{optimizer.kind}({settings})", *_beside(optimizer)])


def optimizer_summary(optimizer: Optimizer) -> str:
    """Return the optimizer's kind, and the settings that differ between parameters."""
    return ", ".join([optimizer.kind, *_beside(optimizer)])


def _beside(optimizer: Optimizer) -> list[str]:
    """Return the settings of a step that are not settings of one kind of optimizer, such as clipping."""
    no_decay = [f"no_decay={optimizer.no_decay}"] if optimizer.no_decay else []
    numbers = [f"{n}={getattr(optimizer, n):g}" for n in ("clip_norm", "clip_value", "ema") if getattr(optimizer, n)]
    patterns = ", ".join(f'"{pattern}"' for pattern in optimizer.frozen)
    frozen = [f"frozen=({patterns})"] if patterns else []
    accumulate = [f"accumulate={optimizer.accumulate}"] if optimizer.accumulate > 1 else []
    return [*no_decay, *map(_group, optimizer.groups), *frozen, *numbers, *accumulate]


def _group(group: ParameterGroup) -> str:
    given = [f"{name}={setting_text(getattr(group, name))}" for name in ("rate", "weight_decay")]
    return f'group("{group.pattern}", {", ".join(g for g in given if not g.endswith("=None"))})'
