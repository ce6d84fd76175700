"""Checks of a graph between stages, without trust: a graph may come from a file. They know only `mbc.ops.KINDS`.

Every failure is an MbcError that names the operation or value. The codes:
MBC053 name, MBC054 kind, MBC055 attributes, MBC056 undefined, MBC057 defined twice, MBC058 type, MBC059 shapes,
MBC060 role, MBC061 update, MBC062 loss, MBC063 operation twice, MBC064 rows, MBC065 dangling, MBC066 not executable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import cast

from mbc.errors import MbcError
from mbc.ir.graph import Network, Operation, Role, State, TrainingGraph, Value
from mbc.ir.metrics import is_metric
from mbc.ir.types import TensorType
from mbc.ops import KINDS
from mbc.ops.base import OpKind, ShapeError
from mbc.source import Span

_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
_STATES = (Role.PARAMETER, Role.STATISTIC, Role.OPTIMIZER, Role.GRADIENT, Role.CONTROL)
_REMEDY = "mbc did not write this graph, or it was edited: compile it again"


def verify_network(network: Network) -> None:
    """Check that `network` is a meaningful graph.

    Raises:
        MbcError: A check failed; the codes are above.
    """
    check = _Check(network.values, network.batch)
    check.outer(network.inputs, network.states, (Role.PARAMETER, Role.STATISTIC))
    check.program(network.operations, executable=False)
    check.finish()
    check.defined("output", network.outputs)
    check.losses(network.operations, tuple(loss for loss, _ in network.losses))
    check.defined("metric", (value for _, terms in network.metrics for value, _ in terms))


def verify_training(graph: TrainingGraph) -> None:
    """Check that both programs of `graph` are complete and typed, and change each state at most once.

    Raises:
        MbcError: A check failed; the codes are above.
    """
    check = _Check(graph.values, graph.batch)
    check.outer(graph.inputs, graph.states, _STATES)
    check.program(graph.train, executable=True)
    check.defined("output", graph.outputs)
    check.defined("loss", (graph.loss,))
    check.defined("metric", graph.metrics)
    if graph.values[graph.loss].type.shape != (1,):
        raise _error("MBC062", f"loss '{graph.loss}' is {graph.values[graph.loss].type}, not one number")
    for name in graph.metrics:
        if not is_metric(graph, name):
            message = f"'{name}' is used as a metric, but neither counts rows nor is a metric of the source"
            raise _error("MBC062", message, graph.values[name].span)
    check.updates(graph.train, graph.updates)
    check.restart()
    check.program(graph.infer, executable=True)
    check.defined("output of the inference graph", graph.infer_outputs)
    check.finish()
    for op in graph.infer:
        if KINDS[op.kind].updates:
            raise _error("MBC061", f"operation '{op.name}' of the inference graph changes a state", op.span)
    for name in graph.infer_inputs:
        if name not in graph.inputs:
            raise _error("MBC065", f"input '{name}' of the inference graph is not an input of the network")
    if len(graph.infer_outputs) != len(graph.outputs):
        raise _error("MBC065", "the inference graph has another number of outputs than the training graph")


def _error(code: str, message: str, span: Span | None = None) -> MbcError:
    return MbcError(code, message, _REMEDY, span)


class _Check:
    def __init__(self, values: Mapping[str, Value], batch: int) -> None:
        self._values = values
        self._batch = batch
        self._outer: set[str] = set()
        self._defined: set[str] = set()
        self._ever: set[str] = set()
        for key, value in values.items():
            if key != value.name or not _NAME.fullmatch(value.name):
                raise _error("MBC053", f"{value.name!r} is not a legal name of a value", value.span)
            shape = value.type.shape
            if not shape or any(n < 1 for n in shape):
                raise _error("MBC058", f"value '{value.name}' has the empty shape {shape}", value.span)
            if value.per_sample and shape[0] != batch:
                raise _error(
                    "MBC064", f"value '{value.name}' has {shape[0]} rows in a mini-batch of {batch}", value.span
                )

    def outer(self, inputs: Iterable[str], states: Iterable[State], roles: tuple[Role, ...]) -> None:
        """Check inputs and states, the values that exist before the first operation."""
        for name, allowed in [*((v, (Role.INPUT,)) for v in inputs), *((s.value, roles) for s in states)]:
            value = self._get(name, "the graph")
            if value.role not in allowed:
                raise _error("MBC060", f"value '{name}' is listed as {allowed[0]}, but is {value.role}", value.span)
            self._define(name, value.span)
        self._outer = set(self._defined)

    def restart(self) -> None:
        """Forget the results of operations, because another program begins."""
        self._defined = set(self._outer)

    def program(self, operations: tuple[Operation, ...], executable: bool) -> None:
        names: set[str] = set()
        for op in operations:
            if not _NAME.fullmatch(op.name):
                raise _error("MBC053", f"{op.name!r} is not a legal name of an operation", op.span)
            if op.name in names:
                raise _error("MBC063", f"there are two operations called '{op.name}'", op.span)
            names.add(op.name)
            self._operation(op, executable)

    def _operation(self, op: Operation, executable: bool) -> None:
        kind = KINDS.get(op.kind)
        if kind is None:
            raise _error("MBC054", f"operation '{op.name}' has the unknown kind '{op.kind}'", op.span)
        if executable and kind.evaluate is None:
            raise _error("MBC066", f"operation '{op.name}': '{op.kind}' exists in networks only", op.span)
        self._attributes(op, kind)
        inputs = tuple(self._get(v, f"operation '{op.name}'", op.span) for v in op.inputs)
        for value in inputs:
            if value.name not in self._defined:
                raise _error("MBC056", f"operation '{op.name}' reads '{value.name}' before it has a value", op.span)
        types = self._shapes(op, kind, inputs)
        if len(types) != len(op.outputs):
            raise _error(
                "MBC058", f"operation '{op.name}' has {len(op.outputs)} outputs, but needs {len(types)}", op.span
            )
        per_sample = not kind.reduces and any(v.per_sample for v in inputs)
        for name, wanted in zip(op.outputs, types, strict=True):
            value = self._get(name, f"operation '{op.name}'", op.span)
            if value.type != wanted:
                raise _error(
                    "MBC058", f"operation '{op.name}': output '{name}' is {value.type}, but must be {wanted}", op.span
                )
            if value.role is not Role.INTERMEDIATE:
                raise _error("MBC060", f"operation '{op.name}' writes '{name}', which is {value.role}", op.span)
            if value.per_sample != per_sample:
                rows = "rows of the mini-batch" if per_sample else "no rows of the mini-batch"
                raise _error("MBC064", f"operation '{op.name}' computes '{name}' with {rows}", op.span)
            self._define(name, op.span)

    def _attributes(self, op: Operation, kind: OpKind) -> None:
        if type(op.attributes) is not kind.attributes:
            raise _error(
                "MBC055",
                f"operation '{op.name}' has {type(op.attributes).__name__}, "
                f"but '{op.kind}' takes {kind.attributes.__name__}",
                op.span,
            )
        for field in fields(op.attributes):
            setting: object = getattr(op.attributes, field.name)
            if not _plain(setting):
                raise _error("MBC055", f"operation '{op.name}': setting '{field.name}' cannot be {setting!r}", op.span)

    def _shapes(self, op: Operation, kind: OpKind, inputs: tuple[Value, ...]) -> tuple[TensorType, ...]:
        try:
            return kind.shape(op.attributes, tuple(v.type for v in inputs))
        except ShapeError as error:
            raise _error("MBC059", f"operation '{op.name}': {error}", op.span) from None
        except (ValueError, TypeError, IndexError, ZeroDivisionError):
            shown = ", ".join(str(v.type) for v in inputs)
            message = f"operation '{op.name}': '{op.kind}' cannot take the operands ({shown})"
            raise _error("MBC059", message, op.span) from None

    def _get(self, name: str, where: str, span: Span | None = None) -> Value:
        if name not in self._values:
            raise _error("MBC056", f"{where} names '{name}', but there is no such value", span)
        return self._values[name]

    def _define(self, name: str, span: Span | None) -> None:
        if name in self._defined:
            raise _error("MBC057", f"value '{name}' is defined twice", span)
        self._defined.add(name)
        self._ever.add(name)

    def defined(self, what: str, names: Iterable[str]) -> None:
        """Check that every value that leaves the graph exists after its operations."""
        for name in names:
            if name not in self._defined:
                raise _error("MBC065", f"no operation computes {what} '{name}'")

    def losses(self, operations: tuple[Operation, ...], losses: tuple[str, ...]) -> None:
        computed = {op.outputs[0] for op in operations if KINDS[op.kind].loss}
        for name in losses:
            if name not in computed:
                raise _error("MBC062", f"'{name}' is used as a loss, but comes from no loss operation")

    def updates(self, operations: tuple[Operation, ...], updates: tuple[tuple[str, str], ...]) -> None:
        """Check that each pair leads from a state to its last version, and that each version is updated once."""
        following: dict[str, str] = {}
        for op in operations:
            for new, old in KINDS[op.kind].updates:
                if old >= len(op.inputs):
                    continue
                was = op.inputs[old]
                if was in following:
                    raise _error("MBC061", f"operation '{op.name}' updates '{was}' a second time", op.span)
                following[was] = op.outputs[new]
        remaining = dict(following)
        for state, after in updates:
            if state not in self._outer or not self._values[state].role.persistent:
                raise _error("MBC061", f"'{state}' is updated, but is not a state")
            version = state
            while version in remaining:
                version = remaining.pop(version)
            if version != after or version == state:
                raise _error("MBC061", f"state '{state}' should become '{after}', but becomes '{version}'")
        for was in remaining:
            raise _error("MBC061", f"'{was}' is changed, but is not a state that the graph updates")

    def finish(self) -> None:
        """Check that every value was computed."""
        for name, value in self._values.items():
            if name not in self._ever:
                raise _error("MBC065", f"no operation computes value '{name}'", value.span)


def _plain(setting: object) -> bool:
    if isinstance(setting, tuple):
        return all(_plain(part) for part in cast("tuple[object, ...]", setting))
    return type(setting) in (int, float, bool, str)
