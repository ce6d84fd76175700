"""Facts on a line of a source (shapes, bytes, predicted time), and on a word in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mbc.editor.complete import layer_detail, signature
from mbc.editor.line_times import LineTimes
from mbc.editor.scan import scan
from mbc.frontend.functions import FUNCTION_HELP
from mbc.frontend.lower import Lowered
from mbc.frontend.sections import OPTIMIZERS
from mbc.ir.graph import Operation, Role
from mbc.ir.types import DType, TensorType
from mbc.ops import LAYERS
from mbc.units import show_size, show_time

MOST_TYPES = 3  # types shown of an operation in a block or loop, which is expanded often


def word_text(text: str, offset: int) -> str:
    """Describe the word at an offset: an operation, a function, an optimizer or a block; return "" for other words."""
    scanned = scan(text)
    at = scanned.word_at(offset)
    name = "" if at is None else scanned.words[at].text
    block = scanned.block(name)
    if block is not None:
        return f"```mbc\n{' '.join(text[block.start : block.end].split('{')[0].split())}\n```"
    if name in LAYERS:
        return f"```mbc\n{layer_detail(LAYERS[name])}\n```\n{LAYERS[name].help}"
    if name in FUNCTION_HELP:
        return f"`{name}`: {FUNCTION_HELP[name]}"
    if name in OPTIMIZERS:
        return f"```mbc\n{signature(name, OPTIMIZERS[name])}\n```"
    return ""


def line_text(networks: Sequence[Lowered], line: int, times: LineTimes | None) -> str:
    """Describe the values of a line in the first network that has it; return "" for a line without values.

    Args:
        networks: Networks of the source.
        line: Number of the line, from 1.
        times: Predicted times of the first network; None while they are not available.
    """
    for i, lowered in enumerate(networks):
        operations = [op for op in lowered.network.operations if op.span is not None and op.span.line == line]
        inputs = [
            v.name for v in lowered.network.values.values() if v.role is Role.INPUT and v.span and v.span.line == line
        ]
        if operations or inputs:
            parts = [_table(lowered, operations, inputs), _parameters(lowered, operations)]
            parts += [_time(times, line)] if i == 0 and operations else []
            return "\n\n".join(part for part in parts if part)
    return ""


def _table(lowered: Lowered, operations: Sequence[Operation], inputs: Sequence[str]) -> str:
    """Format a table with a row for each place of the line, whose operations are expanded once or more."""
    rows = ["| | result | bytes |", "| --- | --- | --- |"]
    for name in inputs:
        stored = _stored(lowered, name)
        rows.append(f"| input `{name}` | `{stored}` | {show_size(stored.size_bytes)} |")
    columns = sorted({op.span.column for op in operations if op.span is not None})
    for column in columns:
        here = [op for op in operations if op.span is not None and op.span.column == column]
        types = [_stored(lowered, output) for op in here for output in op.outputs if _is_new(lowered, output)]
        counted = Counter(map(str, types)).most_common(MOST_TYPES)
        shown = [f"`{name}`" + (f" x {times}" if times > 1 else "") for name, times in counted]
        more = len(set(map(str, types))) - len(counted)
        shown += [f"{more} more"] if more > 0 else []
        kinds = ", ".join(dict.fromkeys(op.kind for op in here))
        rows.append(f"| {kinds} | {', '.join(shown)} | {show_size(sum(t.size_bytes for t in types))} |")
    return "\n".join(rows)


def _is_new(lowered: Lowered, value: str) -> bool:
    """Return whether the value is a tensor of its own, not the next value of a state."""
    return lowered.network.values[value].role is Role.INTERMEDIATE


def _stored(lowered: Lowered, value: str) -> TensorType:
    """Return the type in which the step stores a value: floats have the working precision."""
    stored = lowered.network.values[value].type
    return replace(stored, dtype=lowered.precision.working) if stored.dtype is DType.FP32 else stored


def _parameters(lowered: Lowered, operations: Sequence[Operation]) -> str:
    values = lowered.network.values
    read = {name for op in operations for name in op.inputs if values[name].role is Role.PARAMETER}
    count = sum(values[name].type.elements for name in read)
    return f"{count:,} parameters" if count else ""


def _time(times: LineTimes | None, line: int) -> str:
    if times is None:
        return "Its time is being predicted."
    if times.error:
        return f"No time: {times.error}"
    if not times.step_us:
        return "No time: the network is in fp64, which is for the CPU."
    time_us = times.lines_us.get(line, 0.0)
    share = time_us / times.step_us
    shown = f"{'~' if line in times.estimated else ''}{show_time(time_us)} of a step of {show_time(times.step_us)}"
    return f"{shown} ({share:.1%}), forward and backward, predicted for {times.gpu}"
