"""A plan as JSON values, in the shape that `schema` describes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from pathlib import PurePath
from typing import Any, cast, get_type_hints

from mbc.ir.graph import Operation, State, TrainingGraph, Value
from mbc.ir.optional import written_fields
from mbc.plan.model import SCHEMA_VERSION, Copy, Launch, Plan, Program, Rows
from mbc.plan.schema import (
    BUFFER_COLUMNS,
    FORMAT,
    LAUNCH_COLUMNS,
    MODE_LETTERS,
    OPERATION_COLUMNS,
    STATE_COLUMNS,
    VALUE_COLUMNS,
)
from mbc.source import Source, Span

_REAL = (float, float | None)


def encode_plan(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values, without the checksum."""
    return {
        "format": FORMAT,
        "schema": SCHEMA_VERSION,
        "mbc": plan.version,
        **({"settings": [list(setting) for setting in plan.settings]} if plan.settings else {}),
        "target": _record(plan.target),
        "budget_bytes": plan.budget_bytes,
        "host_limit_bytes": plan.host_limit_bytes,
        **({"peer_limit_bytes": plan.peer_limit_bytes} if plan.peer_limit_bytes else {}),
        "predictions": _record(plan.predictions),
        "bounds": _record(plan.bounds),
        "graph": _graph(plan.graph),
        "buffers": _table(
            BUFFER_COLUMNS,
            (
                [b.value, *_rows(b.rows), b.layout.value, b.dtype.value, b.size_bytes, b.space.value, b.alias, offset]
                for b, offset in zip(plan.buffers, plan.offsets, strict=True)
            ),
        ),
        "train": _program(plan.train),
        "infer": _program(plan.infer),
    }


def _table(columns: Sequence[str], rows: Iterable[list[Any]]) -> dict[str, Any]:
    return {"columns": list(columns), "rows": list(rows)}


def _rows(rows: Rows) -> tuple[int, int]:
    return rows.start, rows.stop


def _record(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name; `optional` fields only where they are set.

    A whole number in a field of type float is written as a float: reading and writing again gives the same text.
    """
    hints = _hints(cast(type[Any], type(value)))
    return {f.name: _plain(getattr(value, f.name), hints[f.name] in _REAL) for f in written_fields(value)}


@cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls)


def _plain(value: Any, real: bool = False) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if is_dataclass(value):
        return _record(value)
    return float(value) if real and value is not None else value


def _graph(graph: TrainingGraph) -> dict[str, Any]:
    spans = _Spans()
    values = _table(VALUE_COLUMNS, (_value(value, spans) for value in graph.values.values()))
    train = _table(OPERATION_COLUMNS, (_operation(op, spans) for op in graph.train))
    infer = _table(OPERATION_COLUMNS, (_operation(op, spans) for op in graph.infer))
    return {
        "name": graph.name,
        "batch": graph.batch,
        "precision": graph.precision.value,
        "optimizer": _record(graph.optimizer),
        "inputs": list(graph.inputs),
        "infer_inputs": list(graph.infer_inputs),
        "outputs": list(graph.outputs),
        "infer_outputs": list(graph.infer_outputs),
        "loss": graph.loss,
        "metrics": list(graph.metrics),
        "sources": [{"name": _file_name(source), "text": source.text} for source in spans.sources],
        "states": _table(STATE_COLUMNS, (_state(state) for state in graph.states)),
        "updates": [[old, new] for old, new in graph.updates],
        "values": values,
        "train": train,
        "infer": infer,
        **({} if graph.ranks is None else {"ranks": _record(graph.ranks)}),
    }


def _file_name(source: Source) -> str:
    """Return the name of the file without its folder: plans do not depend on where a source is."""
    return PurePath(source.name).name or source.name


class _Spans:
    """Spans as rows of numbers, and the sources of the spans in the order of their first use."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self._index: dict[int, int] = {}  # by identity: comparing texts for each span would cost more than all else

    def row(self, span: Span | None) -> list[int] | None:
        if span is None:
            return None
        index = self._index.get(id(span.source))
        if index is None:
            if span.source not in self.sources:
                self.sources.append(span.source)
            index = self._index[id(span.source)] = self.sources.index(span.source)
        return [index, span.line, span.column, span.length]


def _value(value: Value, spans: _Spans) -> list[Any]:
    return [
        value.name,
        value.type.dtype.value,
        list(value.type.shape),
        value.role.value,
        value.per_sample,
        spans.row(value.span),
    ]


def _operation(op: Operation, spans: _Spans) -> list[Any]:
    return [op.name, op.kind, list(op.inputs), list(op.outputs), _record(op.attributes), spans.row(op.span)]


def _state(state: State) -> list[Any]:
    return [state.value, _record(state.initializer)]


def _program(program: Program) -> dict[str, Any]:
    return {
        "entry": list(program.entry),
        "exit": list(program.exit),
        "waits": [list(wait) for wait in program.waits],
        "launches": _table(LAUNCH_COLUMNS, (_launch(launch) for launch in program.launches)),
    }


def _launch(launch: Launch) -> list[Any]:
    work = launch.work
    kernel, settings = (
        (None, []) if isinstance(work, Copy) else ([work.provider, work.name], [list(pair) for pair in work.settings])
    )
    return [
        list(launch.operations),
        kernel,
        settings,
        float(work.time_us),
        work.measured,
        launch.stream.value,
        [[a.buffer, a.rows.start, a.rows.stop, MODE_LETTERS[a.mode]] for a in launch.accesses],
    ]
