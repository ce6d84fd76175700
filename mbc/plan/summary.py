"""A plan operation by operation, for tables and for the comparison of two plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mbc.hardware.streams import Stream
from mbc.kernels.cuda import emulates_fp32
from mbc.kernels.cudnn_convolution import HEURISTIC_ENGINE
from mbc.ops import KINDS
from mbc.ops.fused import joined_kind
from mbc.plan.group import rows_of, title, workspace_bytes
from mbc.plan.live import lifetimes
from mbc.plan.model import Copy, Kernel, Launch, Mode, Plan, Program


@dataclass(frozen=True, slots=True)
class OperationSummary:
    """All launches of one operation, one fused group, or one conversion or copy of a value.

    Attributes:
        name: Name of the operation, title of the fused group, or `value -> layout` for a conversion (with the number of
            the occurrence from the second on).
        kind: Kind of the operation; "copy" or "convert" for launches without one.
        kernels: Each distinct kernel, with its settings.
        emulated_fp32: Whether one of the kernels emulates fp32.
        micro_batches: Rows of each launch, in order.
        layouts: Layouts of inputs and outputs, in the order of the accesses.
        time_us: Time of all launches.
        estimated: Whether one of the times is estimated rather than measured.
        workspace_bytes: Largest workspace of one launch.
        output_bytes: Bytes that the launches write, workspace excluded.
        first_launch: Index of the first launch.
        lifetime: [first write, last read + 1) of the written buffers, in launches of the program.
        stream: Stream of the first launch.
    """

    name: str
    kind: str
    kernels: tuple[str, ...]
    emulated_fp32: bool
    micro_batches: tuple[int, ...]
    layouts: tuple[str, ...]
    time_us: float
    estimated: bool
    workspace_bytes: int
    output_bytes: int
    first_launch: int
    lifetime: tuple[int, int]
    stream: Stream = Stream.COMPUTE


def summarise(
    plan: Plan,
    program: Program,
    groups: Mapping[str, Sequence[int]] | None = None,
    lives: Mapping[int, tuple[int, int]] | None = None,
) -> tuple[OperationSummary, ...]:
    """Return one summary for each operation, in the order of their first launches.

    Args:
        plan: The plan.
        program: One of its programs.
        groups: The result of `grouped(plan, program)`, if the caller has it.
        lives: The result of `lifetimes(program)`, if the caller has it.
    """
    groups = grouped(plan, program) if groups is None else groups
    lives = lifetimes(program) if lives is None else lives
    kinds = {op.name: op.kind for op in (*plan.graph.train, *plan.graph.infer)}
    return tuple(_summary(plan, name, kinds, program, group, lives) for name, group in groups.items())


def grouped(plan: Plan, program: Program) -> Mapping[str, list[int]]:
    """Return the indices of the launches of each summary, by its name."""
    groups: dict[str, list[int]] = {}
    conversions: dict[str, int] = {}
    for i, launch in enumerate(program.launches):
        name = title(launch.operations)
        if not launch.operations:
            name = _conversion(plan, launch)
            conversions[name] = conversions.get(name, 0) + 1
            if conversions[name] > 1:
                name = f"{name} #{conversions[name]}"
        groups.setdefault(name, []).append(i)
    return groups


def _conversion(plan: Plan, launch: Launch) -> str:
    source, target = (plan.buffers[access.buffer] for access in launch.accesses[:2])
    if source.space is not target.space:
        return f"{source.value} -> {target.space}"
    if source.layout is not target.layout:
        return f"{source.value} -> {target.layout}"
    return f"{source.value} -> {target.dtype if source.dtype is not target.dtype else 'copy'}"


def _summary(
    plan: Plan,
    name: str,
    kinds: Mapping[str, str],
    program: Program,
    group: Sequence[int],
    lives: Mapping[int, tuple[int, int]],
) -> OperationSummary:
    launches = [program.launches[i] for i in group]
    first, buffers = launches[0], plan.buffers
    operands = [buffer for access in first.accesses if (buffer := buffers[access.buffer]).value is not None]
    written = {
        access.buffer
        for launch in launches
        for access in launch.accesses
        if access.mode is not Mode.READ and buffers[access.buffer].value is not None
    }
    return OperationSummary(
        name=name,
        kind=joined_kind([kinds[op] for op in first.operations])
        or ("copy" if isinstance(first.work, Copy) else "convert"),
        kernels=tuple(dict.fromkeys(map(kernel_name, launches))),
        emulated_fp32=any(_emulates(plan, launch) for launch in launches),
        micro_batches=tuple([rows_of(plan, launch) for launch in launches]),
        layouts=tuple([str(buffer.layout) for buffer in operands]),
        time_us=sum(launch.work.time_us for launch in launches),
        estimated=not all(launch.work.measured for launch in launches),
        workspace_bytes=max(workspace_bytes(plan, launch) for launch in launches),
        output_bytes=sum([buffers[b].size_bytes for b in written]),
        first_launch=group[0],
        lifetime=(
            min([lives[b][0] for b in written], default=group[0]),
            max([lives[b][1] for b in written], default=group[-1] + 1),
        ),
        stream=first.stream,
    )


def kernel_name(launch: Launch) -> str:
    """Return `provider/name` and the settings as words; `copy` for a copy."""
    if isinstance(launch.work, Copy):
        return "copy"
    work = launch.work
    return " ".join([f"{work.provider}/{work.name}", *settings_words(work.settings)])


def settings_words(settings: Sequence[tuple[str, int]]) -> list[str]:
    """Return `key=value` for each setting, without numbers that stand for something else.

    An engine that cuDNN's heuristics choose on the GPU is `engine=heuristics`. They choose deterministic engines unless
    `deterministic=0` is there. The layout is left out because tables have a column for the layouts of operands.
    """
    words = dict(settings)
    by_heuristics = words.get("engine") == HEURISTIC_ENGINE
    return [
        f"{key}=heuristics" if key == "engine" and by_heuristics else f"{key}={value}"
        for key, value in settings
        if key != "layout" and not (key == "deterministic" and value and by_heuristics)
    ]


def _emulates(plan: Plan, launch: Launch) -> bool:
    work = launch.work
    return isinstance(work, Kernel) and emulates_fp32(work.provider, work.name, plan.graph.precision)


def emulated_share(plan: Plan, program: Program) -> tuple[int, int]:
    """Return the number of matrix products of a program that run in emulated fp32, and the number of all.

    Matrix products are convolutions and linear layers, gradients included.
    """
    products = {op.name for op in (*plan.graph.train, *plan.graph.infer) if KINDS[op.kind].flops is not None}
    run = {name for launch in program.launches for name in launch.operations}
    emulated = {name for launch in program.launches if _emulates(plan, launch) for name in launch.operations}
    return len(products & emulated), len(products & run)
