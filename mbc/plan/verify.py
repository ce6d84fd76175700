"""The independent check of a plan. It shares no code with the search, so that a mistake of the search cannot hide here.

Every compilation runs the check; `mbc verify` runs it alone. It assumes that kernels do what `docs/operations.md` says.
It proves that both programs compute their graphs, in every schedule that streams and waits allow, with exactly the
memory that the plan names, by kernels that exist and take the layouts, types and workspace that they are given.
Statements that only a GPU can check are listed apart (`Verified.unproved`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from mbc.errors import MbcError
from mbc.hardware.streams import ALIGNMENT_BYTES, Space
from mbc.ir.graph import Operation, Role
from mbc.ir.types import Layout, layout_matters
from mbc.kernels.base import Provider
from mbc.ops import KINDS
from mbc.passes.check_graph import verify_training
from mbc.plan.accumulation import ACCUMULATE, Accumulation, accumulating
from mbc.plan.cut import cut
from mbc.plan.demand import Demands, can_hold, first_versions, is_canonical, whole_rows
from mbc.plan.execution import Execution, buffer_name
from mbc.plan.kernels import KNOWN_PROVIDERS, KernelCheck, MeasuredBytes, not_measured
from mbc.plan.live import rounded
from mbc.plan.memory import memory_curve
from mbc.plan.model import Plan, Program
from mbc.plan.verify_optimizer import check_precision, verify_optimizer
from mbc.plan.verify_ranks import verify_rank

_REMEDY = "mbc never writes such a plan: if nobody changed the file, report it with the file; compile again"


@dataclass(frozen=True, slots=True)
class Verified:
    """The checked and recomputed figures of a plan.

    Attributes:
        train_launches: Number of launches of a training step.
        infer_launches: Number of launches of inference.
        buffers: Number of buffers.
        arena_bytes: Size of the arena.
        live_bytes: Peak live bytes of both programs.
        peak_bytes: For each program, live bytes by kind at its peak.
        unproved: By library, the number of launches for which only the library on the GPU can say whether it has the
            kernel and whether the workspace suffices. The library is asked when the module is loaded; a module that
            lacks something is refused.
    """

    train_launches: int
    infer_launches: int
    buffers: int
    arena_bytes: int
    live_bytes: int
    peak_bytes: Mapping[str, Mapping[str, int]]
    unproved: Mapping[str, int]


def verify_plan(
    plan: Plan, measured_bytes: MeasuredBytes = not_measured, providers: Sequence[Provider] = KNOWN_PROVIDERS
) -> Verified:
    """Check the graph of `plan`, then check `plan` against the graph.

    Args:
        plan: The plan.
        measured_bytes: Workspace with which a profile measured a call.
        providers: Providers of the kernels that exist.

    Returns:
        The figures that were recomputed.

    Raises:
        MbcError: Errors of `verify_training`; MBC120 (content of a buffer), MBC121 (its address), MBC122 (entry),
            MBC123 (a launch that does not fit the graph), MBC124 (bytes that hold another value), MBC125 (a missing
            wait), MBC126 (sums over rows), MBC127 (operations that run too often or not at all), MBC128 (aliases),
            MBC129 (exit), MBC130 (impossible waits), MBC131 (figures), MBC132 (operands of one launch that share
            bytes), MBC133 (a kernel that does not exist, or cannot run its launch), MBC134 (too little workspace),
            MBC135 (sums over ranks), MBC136 (parts of a sharded optimizer), MBC137 (another optimizer than the
            updates), MBC138 (another GPU or precision).
    """
    graph = plan.graph
    verify_training(graph)
    verify_optimizer(graph)
    check_precision(graph)
    _check_target(plan)
    demands = {"train": Demands(graph, graph.train), "infer": Demands(graph, graph.infer)}
    _check_references(plan)
    _check_values(plan)
    _check_buffers(plan, {op.outputs[0] for op in _operations(plan) if KINDS[op.kind].view})
    states = first_versions(graph)
    _check_entry(plan, plan.train, "train", (*states, *graph.inputs))
    _check_entry(plan, plan.infer, "infer", (*states, *graph.infer_inputs))
    _check_states_shared(plan, states)
    kernels = KernelCheck(plan, measured_bytes, providers)
    for title, program in (("train", plan.train), ("infer", plan.infer)):
        Execution(plan, program, title, demands[title], kernels).run()
    verify_rank(plan)
    halves = cut(plan)
    part = accumulating(plan, 0 if halves is None else len(halves.forward.launches))
    if part is not None:
        _check_accumulation(plan, part, states, measured_bytes, providers)
    finals = dict(graph.updates)
    results = (*graph.outputs, graph.loss, *graph.metrics)
    _check_exit(plan, plan.train, "train", {state: finals.get(state, state) for state in states}, results, demands)
    _check_exit(plan, plan.infer, "infer", {state: state for state in states}, graph.infer_outputs, demands)
    curves = {"train": memory_curve(plan, plan.train), "infer": memory_curve(plan, plan.infer)}
    live = max(curve.peak_bytes for curve in curves.values())
    _check_figures(plan, live)
    return Verified(
        len(plan.train.launches),
        len(plan.infer.launches),
        len(plan.buffers),
        plan.predictions.arena_bytes,
        live,
        {title: {str(k): n for k, n in curve.at(curve.peak_launch).items()} for title, curve in curves.items()},
        dict(sorted(kernels.unproved.items())),
    )


def _check_accumulation(
    plan: Plan, program: Program, states: tuple[str, ...], measured_bytes: MeasuredBytes, providers: Sequence[Provider]
) -> None:
    """Check the part of the training program that runs for a mini-batch before the last one of a step.

    The part computes everything that does not need the sums of all mini-batches, and leaves the other states unchanged.
    """
    graph = Accumulation(plan.graph).part()
    part = replace(plan, graph=graph)
    demands = {ACCUMULATE: Demands(graph, graph.train)}
    kernels = KernelCheck(part, measured_bytes, providers)
    Execution(part, program, ACCUMULATE, demands[ACCUMULATE], kernels).run()
    finals = dict(graph.updates)
    _check_exit(part, program, ACCUMULATE, {s: finals.get(s, s) for s in states}, graph.outputs, demands)


def _check_target(plan: Plan) -> None:
    """Check that the architecture and the number of multiprocessors are those of the plan's GPU, if mbc knows that GPU.

    Raises:
        MbcError: MBC138 otherwise.
    """
    target, spec = plan.target, plan.target.known_device
    if spec is None:
        return
    for what, says, has in (
        ("architecture", target.architecture, spec.architecture),
        ("multiprocessors", target.multiprocessors, spec.multiprocessors),
    ):
        if says != has:
            raise MbcError(
                "MBC138",
                f"the plan is for {target.gpu} with {what} {says}, but that GPU has {has}",
                "compile the source again for the GPU that it is to run on",
            )


def _operations(plan: Plan) -> tuple[Operation, ...]:
    return (*plan.graph.train, *plan.graph.infer)


def _check_references(plan: Plan) -> None:
    for title, program in (("train", plan.train), ("infer", plan.infer)):
        named = [*program.entry, *program.exit]
        named += [access.buffer for launch in program.launches for access in launch.accesses]
        for index in named:
            if not 0 <= index < len(plan.buffers):
                _fail("MBC123", f"{title}: there is no buffer {index}")


def _check_values(plan: Plan) -> None:
    for name, value in plan.graph.values.items():
        if value.per_sample and (not value.type.shape or value.type.shape[0] != plan.graph.batch):
            _fail("MBC120", f"'{name}' is per sample, but its type is {value.type} and the batch {plan.graph.batch}")


def _check_buffers(plan: Plan, views: set[str]) -> None:
    """Check the rows, layouts, types, sizes and alignment of all buffers, and that they are inside their spaces."""
    ends = {space: plan.predictions.bytes_of(space) for space in Space}
    if len(plan.offsets) != len(plan.buffers):
        _fail("MBC121", f"{len(plan.offsets)} offsets for {len(plan.buffers)} buffers")
    for index, (buffer, offset) in enumerate(zip(plan.buffers, plan.offsets, strict=True)):
        place = buffer_name(index, buffer)
        size_bytes = buffer.size_bytes
        if buffer.value is not None:
            value = plan.graph.values.get(buffer.value)
            if value is None:
                _fail("MBC120", f"{place}: the graph has no such value")
            if buffer.value in views and is_canonical(buffer.layout, value.type.shape):
                _fail("MBC120", f"{place}: a view has a buffer of its own only where it is converted to another layout")
            whole = whole_rows(plan.graph, value)
            if not 0 <= buffer.rows.start < buffer.rows.stop <= whole.stop:
                _fail("MBC120", f"{place}: it holds rows {buffer.rows.start}..{buffer.rows.stop} of {whole.stop}")
            if buffer.layout is not Layout.CHANNELS_FIRST and not layout_matters(value.type.shape):
                _fail("MBC120", f"{place}: a value of shape {value.type.shape} is always in nchw")
            if not can_hold(buffer.dtype, value.type.dtype):
                _fail("MBC120", f"{place}: {buffer.dtype} cannot hold {value.type.dtype}")
            row_elements = value.type.elements // whole.stop
            size_bytes = row_elements * buffer.rows.count * buffer.dtype.size_bytes
        elif buffer.rows.count <= 0 or size_bytes <= 0 or size_bytes % buffer.rows.count:
            _fail("MBC120", f"{place}: {size_bytes} bytes for {buffer.rows.count} rows")
        if buffer.size_bytes != size_bytes:
            _fail("MBC120", f"{place}: it has {buffer.size_bytes} bytes, but its rows need {size_bytes}")
        if offset % ALIGNMENT_BYTES:
            _fail("MBC121", f"{place}: its offset {offset} is not a multiple of {ALIGNMENT_BYTES}")
        if not 0 <= offset <= offset + size_bytes <= ends[buffer.space]:
            _fail(
                "MBC121",
                f"{place}: bytes {offset}..{offset + size_bytes} are outside the {buffer.space} of "
                f"{ends[buffer.space]} bytes",
            )
        if buffer.alias is not None:
            _check_alias(plan, index, place)


def _check_alias(plan: Plan, index: int, place: str) -> None:
    """Check that an alias has exactly the bytes of its buffer."""
    buffer = plan.buffers[index]
    alias = buffer.alias
    if alias is None or not 0 <= alias < index:
        _fail("MBC128", f"{place}: its alias {alias} is not an earlier buffer")
    other = plan.buffers[alias]
    if buffer.value is None or other.value is None:
        _fail("MBC128", f"{place}: workspace cannot be an alias or have one")
    same = plan.offsets[index] == plan.offsets[alias] and (
        (buffer.space, buffer.rows, buffer.layout, buffer.dtype, buffer.size_bytes)
        == (other.space, other.rows, other.layout, other.dtype, other.size_bytes)
    )
    if not same:
        _fail("MBC128", f"{place}: it is an alias of {buffer_name(alias, other)}, but differs in place, rows or layout")


def _check_entry(plan: Plan, program: Program, title: str, names: tuple[str, ...]) -> None:
    """Check that exactly the states and inputs have buffers before the start, one whole buffer each."""
    buffers: dict[str, int] = {}
    expected = frozenset(names)
    for index in program.entry:
        buffer = plan.buffers[index]
        if buffer.value not in expected or buffer.value in buffers:
            _fail("MBC122", f"{title}: {buffer_name(index, buffer)} cannot hold anything before the start")
        value = plan.graph.values[buffer.value]
        if buffer.rows != whole_rows(plan.graph, value):
            _fail("MBC122", f"{title}: {buffer_name(index, buffer)} does not hold all of its value")
        if buffer.space is not Space.ARENA and value.role is not Role.OPTIMIZER:
            _fail("MBC122", f"{title}: {buffer_name(index, buffer)} must be in the arena before the start")
        if buffer.alias is not None:
            _fail(
                "MBC122",
                f"{title}: {buffer_name(index, buffer)} is an alias, so it cannot hold a value before the start",
            )
        if value.role.persistent:
            if buffer.dtype is not value.type.dtype:
                _fail("MBC122", f"{title}: the state {buffer_name(index, buffer)} is kept in {buffer.dtype}")
        elif not is_canonical(buffer.layout, value.type.shape):
            _fail(
                "MBC122", f"{title}: the input {buffer_name(index, buffer)} is not in the row-major order of its shape"
            )
        buffers[buffer.value] = index
    for name in names:
        if name not in buffers:
            _fail("MBC122", f"{title}: no buffer holds '{name}' before the start")


def _check_states_shared(plan: Plan, states: tuple[str, ...]) -> None:
    """Check that both programs have each state in the same buffer."""
    train = {plan.buffers[index].value: index for index in plan.train.entry}
    infer = {plan.buffers[index].value: index for index in plan.infer.entry}
    for state in states:
        if train[state] != infer[state]:
            _fail("MBC122", f"the state '{state}' is {train[state]} in train and {infer[state]} in infer")


def _check_exit(
    plan: Plan,
    program: Program,
    title: str,
    finals: Mapping[str, str],
    results: tuple[str, ...],
    demands: Mapping[str, Demands],
) -> None:
    """Check the end of a program.

    The final version of each state is where the state was at the start. Outputs, loss and metrics are present as a
    whole.

    Args:
        plan: The plan.
        program: The program.
        title: The program, as messages name it.
        finals: For each state, its final version.
        results: Outputs, loss and metrics.
        demands: The demands of each program by title.
    """
    entry = {plan.buffers[index].value: index for index in program.entry}
    held: dict[str | None, list[int]] = {}
    for index in program.exit:
        buffer = plan.buffers[index]
        if buffer.value is None or buffer.rows != whole_rows(plan.graph, plan.graph.values[buffer.value]):
            _fail("MBC129", f"{title}: {buffer_name(index, buffer)} does not hold a whole value at the end")
        held.setdefault(buffer.value, []).append(index)
    for state, final in finals.items():
        start = entry[state]
        there = (plan.offsets[start], plan.buffers[start].layout, plan.buffers[start].dtype, plan.buffers[start].space)
        ends = [
            (plan.offsets[i], plan.buffers[i].layout, plan.buffers[i].dtype, plan.buffers[i].space)
            for i in held.get(final, ())
            if _first_owner(plan, i) == start
        ]
        if there not in ends:
            _fail("MBC129", f"{title}: '{final}' is not at the end where '{state}' was at the start")
    for name in results:
        root = demands[title].root(name)
        if not any(plan.buffers[i].space is Space.ARENA for i in held.get(root, ())):
            _fail("MBC129", f"{title}: no buffer of the arena holds the result '{name}' at the end")
        shape = plan.graph.values[root].type.shape
        if root != name and not any(is_canonical(plan.buffers[i].layout, shape) for i in held[root]):
            _fail(
                "MBC129",
                f"{title}: the result '{name}' is a view of '{root}', which is not in the row-major order of its shape",
            )


def _first_owner(plan: Plan, index: int) -> int:
    """Return the first buffer of a buffer's chain of aliases."""
    alias = plan.buffers[index].alias
    return index if alias is None else _first_owner(plan, alias)


def _check_figures(plan: Plan, live: int) -> None:
    """Check the sizes of the spaces, the budget and the peak live bytes against the recomputed ones."""
    for space in Space:
        said = plan.predictions.bytes_of(space)
        ends = (o + rounded(b.size_bytes) for b, o in zip(plan.buffers, plan.offsets, strict=True) if b.space is space)
        end = max(ends, default=0)
        if said != end:
            _fail("MBC131", f"the plan predicts {said} bytes of {space}, but its buffers end at {end}")
    total = plan.predictions.arena_bytes + plan.predictions.overhead_bytes
    if total > plan.budget_bytes:
        _fail("MBC131", f"arena and overhead take {total} bytes, but the budget is {plan.budget_bytes}")
    host = plan.predictions.host_bytes
    if plan.host_limit_bytes is not None and host > plan.host_limit_bytes:
        _fail("MBC131", f"the plan takes {host} bytes of host memory, but it may take {plan.host_limit_bytes}")
    peer = plan.predictions.peer_bytes
    if peer > plan.peer_limit_bytes:
        _fail("MBC131", f"the plan takes {peer} bytes of another GPU's memory, but it may take {plan.peer_limit_bytes}")
    if plan.bounds.live_bytes != live:
        _fail("MBC131", f"the plan says that its peak live bytes are {plan.bounds.live_bytes}, but they are {live}")


def _fail(code: str, message: str) -> NoReturn:
    raise MbcError(code, message, _REMEDY)
