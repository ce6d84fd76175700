"""Readable text of a graph: one line an operation, in order, the same from run to run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields

from mbc.ir.graph import Initializer, Network, Operation, Optimizer, State, TrainingGraph, Value


def network_text(network: Network) -> str:
    """The forward graph as written."""
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
    """Both programs: the training step with its updates, and inference."""
    lines = [f"training step of {graph.name}, batch {graph.batch}, {graph.precision}, {_optimizer(graph.optimizer)}"]
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
        settings = "".join(f"; {f.name} {_setting(getattr(op.attributes, f.name))}" for f in fields(op.attributes))
        label = "" if op.outputs[:1] == (op.name,) else f"  # {op.name}"
        lines.append(f"  {outputs} = {op.kind}({', '.join(op.inputs)}{settings}){label}")
    return lines


def _setting(setting: object) -> str:
    if isinstance(setting, bool):
        return str(setting).lower()
    return f"{setting:g}" if isinstance(setting, float) else str(setting)


def _initializer(initializer: Initializer) -> str:
    if initializer.fan_in or initializer.fan_out:
        return f"{initializer.kind}({initializer.fan_in} in, {initializer.fan_out} out)"
    return f"{initializer.kind}({initializer.value:g})"


def _optimizer(optimizer: Optimizer) -> str:
    if optimizer.kind == "adamw":
        settings = (
            f"beta1={optimizer.beta1:g}, beta2={optimizer.beta2:g}, eps={optimizer.eps:g}, "
            f"weight_decay={optimizer.weight_decay:g}"
        )
    else:
        settings = (
            f"momentum={optimizer.momentum:g}, nesterov={str(optimizer.nesterov).lower()}, "
            f"weight_decay={optimizer.weight_decay:g}"
        )
    return f"{optimizer.kind}({settings})"
