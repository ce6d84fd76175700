"""JSON values as a plan: checks presence, type, range and references of every field, and refuses everything else."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

from mbc.errors import MbcError
from mbc.hardware.datasheet import sheet_fault
from mbc.hardware.part import split_name
from mbc.hardware.streams import Space, Stream
from mbc.ir.graph import Initializer, Operation, Optimizer, Ranks, Role, State, TrainingGraph, Value
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.ops import KINDS
from mbc.plan.model import Access, Bounds, Buffer, Copy, Kernel, Launch, Plan, Predictions, Program, Rows, Target
from mbc.plan.records import (
    NO_SUCH_THING,
    BadField,
    array,
    at,
    boolean,
    choice,
    each,
    kernel_name,
    keyed,
    member,
    name,
    real,
    record,
    string,
    table,
    text,
    whole,
)
from mbc.plan.schema import (
    BUFFER_COLUMNS,
    CHECKSUM,
    DEFAULTS,
    LAUNCH_COLUMNS,
    MODE_LETTERS,
    OPERATION_COLUMNS,
    STATE_COLUMNS,
    VALUE_COLUMNS,
)
from mbc.source import Source, Span

OUTSIDE = "MBC117"
_ARCHITECTURE = re.compile(r"sm_[0-9]{2,3}[af]?")
_MODES = {letter: mode for mode, letter in MODE_LETTERS.items()}
_LAYOUTS = {layout.value: layout for layout in Layout}
_DTYPES = {dtype.value: dtype for dtype in DType}
_STREAMS = {stream.value: stream for stream in Stream}
_FIELDS = (
    "format", "schema", "mbc", "settings", "target", "budget_bytes", "host_limit_bytes", "peer_limit_bytes",
    "predictions", "bounds", "graph", "buffers", "train", "infer", CHECKSUM,
)  # fmt: skip
_GRAPH_FIELDS = (
    "name", "batch", "precision", "optimizer", "inputs", "infer_inputs", "outputs", "infer_outputs", "loss", "metrics",
    "sources", "states", "updates", "values", "train", "infer", "ranks",
)  # fmt: skip


def decode_plan(document: Mapping[str, Any]) -> Plan:
    """Return the plan in a document whose format, schema version and checksum are right.

    Args:
        document: The parsed JSON object of a plan file.

    Raises:
        BadField: A field is missing, unknown or wrong.
    """
    document = keyed(document, _FIELDS, DEFAULTS["plan"])
    graph = at("graph", _graph, document["graph"])
    predictions = at("predictions", record, Predictions, document["predictions"], 0)
    at("predictions", _check_ranges, predictions)
    target = at("target", record, Target, document["target"], 0)
    at("target", _check_target, target)
    bounds = at("bounds", record, Bounds, document["bounds"], 0)
    train_operations = frozenset(op.name for op in graph.train)
    infer_operations = frozenset(op.name for op in graph.infer)
    at("bounds.floor_operation", member, bounds.floor_operation, train_operations | infer_operations, "operation")
    placed = at(
        "buffers",
        table,
        document["buffers"],
        BUFFER_COLUMNS,
        _BufferReader(graph, predictions).read,
        DEFAULTS["buffers"],
    )
    buffers = tuple(buffer for buffer, _ in placed)
    for i, buffer in enumerate(buffers):
        if buffer.alias is not None and buffer.alias >= len(buffers):
            raise BadField(f"there is no buffer {buffer.alias}", f"buffers.rows[{i}].alias", NO_SUCH_THING)
    host_limit = document["host_limit_bytes"]
    return Plan(
        version=at("mbc", string, document["mbc"]),
        graph=graph,
        target=target,
        budget_bytes=at("budget_bytes", whole, document["budget_bytes"]),
        buffers=buffers,
        offsets=tuple(offset for _, offset in placed),
        train=at("train", _program, document["train"], len(buffers), train_operations),
        infer=at("infer", _program, document["infer"], len(buffers), infer_operations),
        predictions=predictions,
        bounds=bounds,
        host_limit_bytes=None if host_limit is None else at("host_limit_bytes", whole, host_limit),
        peer_limit_bytes=at("peer_limit_bytes", whole, document["peer_limit_bytes"]),
        settings=at("settings", each, document["settings"], _asked),
    )


def _asked(value: Any) -> tuple[str, str]:
    """Return one setting of the plan as (name, value)."""
    name, said = each(array(value, 2), string)
    return name, said


def _check_ranges(predictions: Predictions) -> None:
    for program in ("train", "infer"):
        low, time, high = (getattr(predictions, f"{program}{end}_us") for end in ("_low", "", "_high"))
        if not low <= time <= high:
            raise BadField(f"{time} is not between {low} and {high}", f"{program}_us")


def _check_target(target: Target) -> None:
    if not _ARCHITECTURE.fullmatch(target.architecture):
        raise BadField(f"'{target.architecture}' is not an architecture such as sm_90", "architecture")
    if target.sheet is not None and (fault := sheet_fault(target.sheet)):
        raise BadField(f"'{fault}' is out of range", "sheet")
    try:
        split_name(target.gpu)
    except MbcError as error:
        raise BadField(error.message, "gpu") from error


def _graph(value: Any) -> TrainingGraph:
    fields = keyed(value, _GRAPH_FIELDS, DEFAULTS["graph"])
    sources = at("sources", each, fields["sources"], _source)
    values: dict[str, Value] = {}

    def read_value(row: list[Any]) -> None:
        value = _value(row, sources)
        if value.name in values:
            raise BadField(f"there are two values '{value.name}'", "name")
        values[value.name] = value

    at("values", table, fields["values"], VALUE_COLUMNS, read_value, DEFAULTS["values"])

    def read_state(row: list[Any]) -> State:
        return _state(row, values)

    def operations(key: str) -> tuple[Operation, ...]:
        taken: set[str] = set()

        def read(row: list[Any]) -> Operation:
            operation = _operation(row, values, sources)
            if operation.name in taken:
                raise BadField(f"there are two operations '{operation.name}'", "name")
            taken.add(operation.name)
            return operation

        return at(key, table, fields[key], OPERATION_COLUMNS, read, DEFAULTS["operations"])

    def named(key: str) -> tuple[str, ...]:
        return at(key, each, fields[key], member, values, "value")

    return TrainingGraph(
        name=at("name", name, fields["name"]),
        batch=at("batch", whole, fields["batch"], 1),
        precision=at("precision", choice, fields["precision"], Precision),
        optimizer=at("optimizer", record, Optimizer, fields["optimizer"], 0),
        values=values,
        train=operations("train"),
        infer=operations("infer"),
        states=at("states", table, fields["states"], STATE_COLUMNS, read_state, DEFAULTS["states"]),
        inputs=named("inputs"),
        infer_inputs=named("infer_inputs"),
        outputs=named("outputs"),
        infer_outputs=named("infer_outputs"),
        loss=at("loss", member, fields["loss"], values, "value"),
        metrics=named("metrics"),
        updates=at("updates", each, fields["updates"], _pair, values),
        ranks=None if fields["ranks"] is None else at("ranks", _ranks, fields["ranks"], fields["batch"]),
    )


def _ranks(value: Any, batch: int) -> Ranks:
    fields = keyed(value, ("rows", "members"))
    rows = at("rows", each, fields["rows"], whole, 1)
    if len(rows) < 2:
        raise BadField(f"at least 2 ranks share a mini-batch, not {len(rows)}", "rows")
    members = at("members", each, fields["members"], whole, 0, len(rows) - 1)
    if not members or list(members) != sorted(set(members)) or any(rows[rank] != batch for rank in members):
        raise BadField(f"the ranks {list(members)} do not have {batch} rows each", "members")
    return Ranks(rows, members)


def _source(value: Any) -> Source:
    fields = keyed(value, ("name", "text"))
    return Source(at("name", text, fields["name"]), at("text", text, fields["text"]))


def _span(value: Any, sources: tuple[Source, ...]) -> Span | None:
    if value is None:
        return None
    source, line, column, length = (whole(number) for number in array(value, 4))
    if source >= len(sources):
        raise BadField(f"there is no source {source}", code=NO_SUCH_THING)
    return Span(sources[source], line, column, length)


def _value(row: list[Any], sources: tuple[Source, ...]) -> Value:
    dtype = at("dtype", choice, row[1], DType)
    shape = at("shape", each, row[2], whole, 1)
    role = at("role", choice, row[3], Role)
    per_sample = at("per_sample", boolean, row[4])
    return Value(
        at("name", name, row[0]), TensorType(shape, dtype), role, per_sample, at("span", _span, row[5], sources)
    )


def _operation(row: list[Any], values: Mapping[str, Value], sources: tuple[Source, ...]) -> Operation:
    kind = at("kind", member, row[1], KINDS, "kind of operation")
    return Operation(
        at("name", name, row[0]),
        kind,
        at("inputs", each, row[2], member, values, "value"),
        at("outputs", each, row[3], member, values, "value"),
        at("attributes", record, KINDS[kind].attributes, row[4]),
        at("span", _span, row[5], sources),
    )


def _state(row: list[Any], values: Mapping[str, Value]) -> State:
    return State(at("value", member, row[0], values, "value"), at("initializer", record, Initializer, row[1]))


def _pair(value: Any, values: Mapping[str, Value]) -> tuple[str, str]:
    old, new = array(value, 2)
    return member(old, values, "value"), member(new, values, "value")


class _BufferReader:
    """Reader of rows of the table of buffers, as pairs (buffer, offset)."""

    def __init__(self, graph: TrainingGraph, predictions: Predictions) -> None:
        self._values = graph.values
        self._batch = graph.batch
        self._sizes = {space: predictions.bytes_of(space) for space in Space}

    def read(self, row: list[Any]) -> tuple[Buffer, int]:
        value, start, stop, layout, dtype, size_bytes, space_name, alias, offset = row
        if value is not None:
            at("value", member, value, self._values, "value")
        if value is not None and not self._values[value].per_sample and stop != 1:
            raise BadField(f"'{value}' is not per sample, so its rows must be 0..1", "stop")
        space = at("space", choice, space_name, Space)
        buffer = Buffer(
            value,
            _rows(start, stop, self._batch),
            _LAYOUTS[at("layout", _allowed, layout, _LAYOUTS)],
            _DTYPES[at("dtype", _allowed, dtype, _DTYPES)],
            at("size_bytes", whole, size_bytes, 1),
            space,
            None if alias is None else at("alias", whole, alias),
        )
        end = at("offset", whole, offset) + buffer.size_bytes
        if end > self._sizes[space]:
            raise BadField(
                f"bytes {offset}..{end} are outside the {space} of {self._sizes[space]} bytes", "offset", OUTSIDE
            )
        return buffer, offset


def _allowed(value: Any, allowed: Container[str]) -> str:
    if type(value) is not str or value not in allowed:
        raise BadField(f"{value!r} is not known")
    return value


def _rows(start: Any, stop: Any, batch: int) -> Rows:
    at("start", whole, start, 0, batch - 1)
    at("stop", whole, stop, start + 1, batch)
    return Rows(start, stop)


def _program(value: Any, buffers: int, operations: frozenset[str]) -> Program:
    fields = keyed(value, ("entry", "exit", "waits", "launches"), DEFAULTS["program"])
    launches = at(
        "launches",
        table,
        fields["launches"],
        LAUNCH_COLUMNS,
        _LaunchReader(buffers, operations).read,
        DEFAULTS["launches"],
    )
    return Program(
        launches,
        at("waits", each, fields["waits"], _wait, len(launches)),
        at("entry", each, fields["entry"], _index, buffers, "buffer"),
        at("exit", each, fields["exit"], _index, buffers, "buffer"),
    )


def _wait(value: Any, launches: int) -> tuple[int, int]:
    earlier, later = array(value, 2)
    return _index(earlier, launches, "launch"), _index(later, launches, "launch")


def _index(value: Any, count: int, what: str) -> int:
    if type(value) is not int or not 0 <= value < count:
        raise BadField(f"there is no {what} {value!r}; there are {count}", code=NO_SUCH_THING)
    return value


class _LaunchReader:
    """Reader of rows of the table of launches.

    Equal row ranges become one object, because a deep plan has few distinct ones.
    """

    def __init__(self, buffers: int, operations: frozenset[str]) -> None:
        self._buffers = buffers
        self._operations = operations
        self._rows: dict[tuple[int, int], Rows] = {}

    def read(self, row: list[Any]) -> Launch:
        operations, kernel, settings, time_us, measured, stream, accesses = row
        microseconds = at("time_us", real, time_us)
        is_measured = at("measured", boolean, measured)
        work: Kernel | Copy
        if kernel is None:
            if settings != []:
                raise BadField("a copy has no settings", "settings")
            work = Copy(microseconds, is_measured)
        else:
            provider, called = at("kernel", array, kernel, 2)
            names = at("kernel[0]", name, provider), at("kernel[1]", kernel_name, called)
            work = Kernel(*names, at("settings", each, settings, _setting), microseconds, is_measured)
        return Launch(
            work,
            at("operations", each, operations, member, self._operations, "operation of this program"),
            _STREAMS[at("stream", _allowed, stream, _STREAMS)],
            at("accesses", each, accesses, self._access),
        )

    def _access(self, value: Any) -> Access:
        buffer, start, stop, letter = array(value, 4)
        mode = _MODES.get(letter) if type(letter) is str else None
        if mode is None:
            raise BadField(f"the mode {letter!r} is not one of {', '.join(_MODES)}")
        _index(buffer, self._buffers, "buffer")
        rows = self._rows.get((start, stop)) if type(start) is int and type(stop) is int else None
        if rows is None:
            rows = self._rows[start, stop] = Rows(whole(start), whole(stop, start + 1))
        return Access(buffer, rows, mode)


def _setting(value: Any) -> tuple[str, int]:
    key, number = array(value, 2)
    return name(key), whole(number, -(1 << 62))
