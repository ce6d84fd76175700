"""Fit a step into the room: workspaces, and what is kept, made again or sent to the host, chosen together.

Workspace and kept values compete for the same bytes. So values are chosen under several limits of workspace; of what
fits, each operation then takes the workspace that is free at its moment, and the fastest step wins.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mbc.device.spec import DeviceSpec
from mbc.ir.graph import Role
from mbc.ops.fused import SEPARATOR, kind_of
from mbc.optimize.addresses import Placed, assign_addresses
from mbc.optimize.bounds import floor_bytes
from mbc.optimize.candidates import CandidateTable
from mbc.optimize.choose import Choices, choose
from mbc.optimize.contention import contention
from mbc.optimize.fuse import Programs
from mbc.optimize.homes import at_host, most_together_bytes, movable_states, persistent_bytes, states_of
from mbc.optimize.lifetimes import aligned, blocks, live_bytes
from mbc.optimize.menus import Slice
from mbc.optimize.order import Draft, order
from mbc.optimize.rechoose import rechosen
from mbc.optimize.reside import Means, Resided, reside
from mbc.optimize.simulate import simulate
from mbc.optimize.strips import Division, divided_operations, interleaved
from mbc.optimize.synchronise import synchronise
from mbc.optimize.takeover import take_over
from mbc.plan.model import Space

UNLIMITED_BYTES = 1 << 62
MOST_ROUNDS = 8
# Limits of workspace that are tried, as parts of the room; the rest is for what is kept.
WORKSPACE_PARTS = (1.0, 0.6, 0.42, 0.3, 1 / 5, 1 / 8, 1 / 16, 1 / 64, 0.0)
# Parts of what is too much that go to the host at most, where all may.
OFFLOAD_PARTS = (0.5, 0.0)
# Where something fits, a way that takes so many times the room is as far as others like it.
HOPELESS = 1.2
# Launches times ways that are compared; a longer program is fitted in fewer ways.
WAYS_WORK = 15_000
# Of the room, what placing may leave unused between buffers before another try is worth less.
MOST_SPARED = 0.15
LEAST_SPARED = 0.004
# Ways that are placed, at most and at least; launches of all of them together.
MOST_PLACED = 8
LEAST_PLACED = 3
PLACED_WORK = 15_000
# States of less than this part of the room stay where they are used, if anything fits beside them; and so do all where
# the step is no slower than this, over the fastest.
WORTH_MOVING = 0.1
GOOD_ENOUGH = 1.02
NO_SLOWER = 1e-3  # over the fastest: what a prediction cannot tell apart
# Where they are more than this part of the room, they are looked at away from the start.
CROWDED = 0.4
# Values above these parts of the room are handed on in micro-batches; where something fits without, only if the largest
# takes so much of the room. A micro-batch is such a part of the room at most: several exist at once. What takes longer
# to make than so many passes over it may be kept as a whole for the backward pass.
DIVIDED_PARTS = (1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64)
WORTH_DIVIDING = 0.2
# Operations times divisions into strips that are compared, of the same values.
DIVISIONS_WORK = 1000
MICRO_BATCH_PARTS = (1 / 8, 1 / 16)
AGAIN_PASSES = 6
# How long states are in the arena for their update, in times of their copy, and what goes to the host first: so many
# times of what is lacking, and what is in the arena for an update, with such a lead.
LONG_LEAD = 2.0
LACKING_TIMES = ((1.0, 0.5), (1.5, 0.0))


@dataclass(frozen=True)
class Fitted:
    """A draft with addresses. It is over the room where nothing was found that is not."""

    draft: Draft
    placed: Placed
    device: DeviceSpec

    @cached_property
    def step_us(self) -> float:
        """Predicted time of the training step, waits for copies included."""
        return _time_us(self.device, self.draft, self.placed)


@dataclass(frozen=True, slots=True)
class _Way:
    """`ordered`: the draft as it was before anything was decided. `divided`: operations in strips, which keep their
    division."""

    ordered: Draft
    time_us: float
    resided: Resided
    choices: Choices
    means: Means
    divided: Collection[str]


def fit(
    table: CandidateTable,
    most: Mapping[str, int],
    means: Means,
    room_bytes: int,
    programs: Programs | None = None,
) -> Fitted:
    """The fastest step that was found within the room; where none was, the smallest.

    `most`: workspace of operations by name, whatever is free. The states of the optimizer go to the host where they are
    much of the room, and something else does not fit beside them or takes long to. `programs`: what runs as a group;
    its values are kept, made again or sent to the host as a whole, and states stay.
    """
    found: list[Fitted] = []
    looked_at: set[Means] = set()

    def tried(here: Means) -> Fitted | None:
        looked_at.add(here)
        fitted = _fit(table, most, here, room_bytes, _least_us(found, room_bytes), programs)
        if fitted is not None:
            found.append(fitted)
        return fitted

    if programs is not None:
        tried(means)
        return faster(found, room_bytes)
    whole_bytes, _ = floor_bytes(table, means.host_bytes if means.offload > 0 else 0)
    moved_bytes = _movable_bytes(table, means)
    if moved_bytes > CROWDED * room_bytes:
        tried(replace(means, states_bytes=moved_bytes, lead=LONG_LEAD))  # beside them little room is left
    if whole_bytes <= room_bytes or not means.split:
        tried(means)
    best = means
    for divisions in _divisions(table, most, means, room_bytes, found):
        better = slower = False
        for division in divisions:
            here = replace(means, division=division)
            fitted = tried(here)
            if fitted is not None and faster(found, room_bytes) is fitted:
                best, better = here, True
            elif fitted is None or fitted.placed.arena_bytes <= room_bytes:
                slower = True
        if slower and not better:
            break  # more values in parts take longer
    if not looked_at:
        tried(means)
    for here in _with_states_away(table, most, best, room_bytes, faster(found, room_bytes)):
        fitted = None if here in looked_at else tried(here)
        if fitted is not None and fitted.placed.arena_bytes <= room_bytes:
            break
    return faster(found, room_bytes)


def _movable_bytes(table: CandidateTable, means: Means) -> int:
    """Of the optimizer's states, where they may be in host memory; 0 where they may not, or do not all find room."""
    sizes = (table.graph.values[state.value] for state in table.graph.states)
    all_bytes = sum(aligned(value.type.size_bytes) for value in sizes if value.role is Role.OPTIMIZER)
    return all_bytes if means.offload > 0 and all_bytes <= means.host_bytes else 0


def _divisions(
    table: CandidateTable, most: Mapping[str, int], means: Means, room_bytes: int, found: Sequence[Fitted]
) -> Iterator[list[Division]]:
    """Which values to hand on in micro-batches: at first the largest, then smaller ones too."""
    graph = table.graph
    if not means.split or (found and _is_good(table, most, faster(found, room_bytes), room_bytes)):
        return
    sizes = {
        value.type.size_bytes for name, value in graph.values.items() if value.per_sample and name not in graph.inputs
    }
    largest_bytes = max(sizes, default=0)
    if any(f.placed.arena_bytes <= room_bytes for f in found) and largest_bytes < WORTH_DIVIDING * room_bytes:
        return
    pass_us = 2 / (table.device.copy_gb_s * 1e3)  # a byte read and written
    known: set[int] = set()
    for part in DIVIDED_PARTS:
        large_bytes = max((size for size in sizes if size <= part * room_bytes), default=0)
        if large_bytes >= largest_bytes or large_bytes in known:
            continue
        known.add(large_bytes)
        tried: list[Division] = []
        for micro_part in MICRO_BATCH_PARTS:
            rows = 1 << max(0, int(graph.batch * micro_part * room_bytes / largest_bytes).bit_length() - 1)
            if rows < graph.batch:
                tried += [Division(large_bytes, rows, price) for price in (math.inf, AGAIN_PASSES * pass_us)]
        yield tried[: max(1, DIVISIONS_WORK // len(graph.train))]


def _with_states_away(
    table: CandidateTable, most: Mapping[str, int], means: Means, room_bytes: int, found: Fitted
) -> Iterator[Means]:
    """What is worth trying beside what was found, more and more of the optimizer's states at the host."""
    if means.offload <= 0 or _is_good(table, most, found, room_bytes):
        return
    all_bytes = sum(aligned(found.draft.buffers[b].size_bytes) for b in movable_states(table.graph, found.draft))
    lacking_bytes = found.placed.arena_bytes - room_bytes
    if lacking_bytes <= 0:
        if all_bytes > WORTH_MOVING * room_bytes:
            yield replace(means, states_bytes=all_bytes, lead=LONG_LEAD)
        return
    together_bytes = most_together_bytes(table.graph)
    for times, lead in LACKING_TIMES:
        states_bytes = int(times * lacking_bytes) + together_bytes
        if states_bytes < all_bytes:
            yield replace(means, states_bytes=states_bytes, lead=lead)
    for lead in (LONG_LEAD, 0.0) if all_bytes else ():
        yield replace(means, states_bytes=all_bytes, lead=lead)


def _is_good(table: CandidateTable, most: Mapping[str, int], found: Fitted, room_bytes: int) -> bool:
    fastest_us = choose(table, most).train_us
    fits = found.placed.arena_bytes <= room_bytes
    return fits and found.step_us <= GOOD_ENOUGH * fastest_us


def faster(found: Sequence[Fitted], room_bytes: int) -> Fitted:
    """The fastest that is within the room; where none is, the smallest."""
    fitting = [f for f in found if f.placed.arena_bytes <= room_bytes]
    if fitting:
        return min(fitting, key=lambda f: f.step_us)
    return min(found, key=lambda f: f.placed.arena_bytes)


def _least_us(found: Sequence[Fitted], room_bytes: int) -> float:
    """Time of the fastest that is within the room; infinite where none is."""
    return min((f.step_us for f in found if f.placed.arena_bytes <= room_bytes), default=math.inf)


def _ordered(table: CandidateTable, choices: Choices, means: Means) -> Draft:
    draft = order(table, choices)
    if means.division is not None:
        draft = interleaved(table, draft, means.division)
    states = states_of(table.graph, draft, means.states_bytes, means.host_bytes)
    if not states:
        return draft
    return at_host(table.graph, draft, states, table.device.host_link, means.lead)


def _fit(
    table: CandidateTable,
    most: Mapping[str, int],
    means: Means,
    room_bytes: int,
    known_us: float,
    programs: Programs | None,
) -> Fitted | None:
    """None where nothing was found that is within the room and could take less than `known_us`, which another does."""
    if means.division is not None:
        found = list(_make_room(table, most, means, room_bytes, known_us))
        return faster(found, room_bytes) if found else None
    kept = keep_all(table, most, means, room_bytes, programs)
    if kept.placed.arena_bytes <= room_bytes and _is_fastest(table, most, kept, programs):
        return kept
    found = [kept]
    if means.recompute or means.offload > 0:
        found += _make_room(table, most, means, room_bytes, known_us, programs)
    return faster(found, room_bytes)


def keep_all(
    table: CandidateTable, most: Mapping[str, int], means: Means, room_bytes: int, programs: Programs | None = None
) -> Fitted:
    """Everything kept, with less workspace where it does not fit. `programs`: what runs as a group."""
    limits = most
    spared_bytes = 0  # of the room: what placing leaves unused between buffers
    smallest: Fitted | None = None
    for _ in range(MOST_ROUNDS):
        choices = choose(table, limits, programs=programs)
        draft = take_over(table.graph, _ordered(table, choices, means), (*choices.train, *choices.infer))
        free = _free(draft, room_bytes - spared_bytes)
        hopeless = min(free.values()) < 0
        if hopeless and smallest is not None:
            break
        placed = assign_addresses(draft, room_bytes, thorough=not hopeless)
        if placed.arena_bytes <= room_bytes:
            return Fitted(draft, placed, table.device)
        if smallest is None or placed.arena_bytes < smallest.placed.arena_bytes:
            smallest = Fitted(draft, placed, table.device)
        if placed.live_bytes <= room_bytes:
            spared_bytes += placed.arena_bytes - room_bytes
            free = _free(draft, room_bytes - spared_bytes)
        # Where what is kept alone is too much, no workspace is small enough.
        tighter = {name: min(limit, max(0, free.get(name, limit))) for name, limit in most.items()}
        if tighter == limits or min(free.values()) < 0:
            break
        limits = tighter
    assert smallest is not None
    return smallest


def _is_fastest(table: CandidateTable, most: Mapping[str, int], kept: Fitted, programs: Programs | None) -> bool:
    """Whether more room would not help."""
    return kept.step_us <= choose(table, most, programs=programs).train_us * (1 + NO_SLOWER)


def _make_room(
    table: CandidateTable,
    most: Mapping[str, int],
    means: Means,
    room_bytes: int,
    known_us: float,
    programs: Programs | None = None,
) -> Iterator[Fitted]:
    """Steps that make room, placed: the most promising way; where placing takes more than the room, again in less."""
    ways = _ways(table, most, means, room_bytes, known_us, programs)
    fitting = [way for way in ways if way.resided.live_bytes <= room_bytes]
    if not fitting:
        if ways and math.isinf(known_us):
            smallest = min(ways, key=lambda way: way.resided.live_bytes).resided.draft
            yield Fitted(smallest, assign_addresses(smallest, thorough=False), table.device)
        return
    # The fastest first; one that placing takes more than the room for is tried again in less.
    # Ways that decide the same in the same layouts differ in workspace, which is chosen anew below.
    ordered = sorted(fitting, key=lambda way: -way.time_us)
    different = {(way.resided.decisions, tuple(b.layout for b in way.ordered.buffers)): way for way in ordered}.values()
    tried = [(way.time_us, number, 0, way) for number, way in enumerate(different)]
    heapq.heapify(tried)
    best_us = known_us  # where addresses are tight, kernels may wait longer for copies than it seemed
    most_placed = min(MOST_PLACED, max(LEAST_PLACED, PLACED_WORK // len(fitting[0].resided.draft.train.launches)))
    for number in range(len(fitting), len(fitting) + most_placed):
        if not tried or tried[0][0] >= best_us:
            return
        _, _, spared_bytes, way = heapq.heappop(tried)
        draft = _with_free_workspace(table, most, way, room_bytes - spared_bytes)
        found = Fitted(draft, assign_addresses(draft, room_bytes), table.device)
        yield found
        lacking_bytes = found.placed.arena_bytes - room_bytes
        if lacking_bytes <= 0:
            best_us = min(best_us, found.step_us)
            continue
        spared_bytes = max(4 * spared_bytes, lacking_bytes // 8, int(LEAST_SPARED * room_bytes))
        if spared_bytes > MOST_SPARED * room_bytes:
            continue
        way = _way(table, way.ordered, way.choices, way.means, way.divided, room_bytes - spared_bytes)
        if way.resided.live_bytes <= room_bytes - spared_bytes:
            heapq.heappush(tried, (way.time_us, number, spared_bytes, way))


def _ways(
    table: CandidateTable,
    most: Mapping[str, int],
    means: Means,
    room_bytes: int,
    known_us: float,
    programs: Programs | None,
) -> list[_Way]:
    """The step fitted under several limits of workspace; under those that are best for it, with less sent to the
    host."""
    known: set[tuple[float, ...]] = set()
    found: list[_Way] = []
    left, best_us, worse = WAYS_WORK, known_us, 0
    for part in WORKSPACE_PARTS:
        limit_bytes = int(part * room_bytes)
        limits = {name: min(limit, limit_bytes) for name, limit in most.items()}
        choices = choose(table, limits, programs=programs)
        divided: Mapping[str, int] = {}
        if means.division is not None:
            divided = divided_operations(table, order(table, choices), means.division)
            choices = choose(table, limits, divided)
        points = tuple(float(c.point.workspace_bytes) for c in choices.operations.values())
        if points in known or choices.train_us >= best_us:
            continue
        known.add(points)
        draft = _ordered(table, choices, means)
        found.append(_way(table, draft, choices, means, divided, room_bytes, best_us))
        left -= len(choices.operations)
        better = found[-1].resided.live_bytes <= room_bytes and found[-1].time_us < best_us
        if better:
            best_us = found[-1].time_us
        worse = 0 if better else worse + 1
        if math.isfinite(best_us) and (left < 0 or worse > 1):
            break
        if math.isfinite(known_us) and found[-1].resided.live_bytes > HOPELESS * room_bytes:
            return found
    if not means.recompute:
        return found
    for way in sorted(found, key=lambda way: (way.resided.live_bytes > room_bytes, way.time_us))[:2]:
        sent = way.resided.sent
        for part in OFFLOAD_PARTS:
            # More than the link can carry makes no difference.
            if part < min(sent, means.offload) and left > 0:
                here = replace(means, offload=part)
                found.append(_way(table, way.ordered, way.choices, here, way.divided, room_bytes, best_us))
                left -= len(way.choices.operations)
    return found


def _way(
    table: CandidateTable,
    draft: Draft,
    choices: Choices,
    means: Means,
    divided: Collection[str],
    room_bytes: int,
    known_us: float = math.inf,
) -> _Way:
    at_home = (draft.buffers[b] for b in draft.persistent)
    taken_bytes = sum(aligned(buffer.size_bytes) for buffer in at_home if buffer.space is Space.HOST)
    left = replace(means, host_bytes=means.host_bytes - taken_bytes)
    groups = (*choices.train, *choices.infer)
    resided = reside(table.graph, draft, table.device.host_link, left, room_bytes, known_us, groups)
    placed = assign_addresses(resided.draft, thorough=False)
    return _Way(draft, _time_us(table.device, resided.draft, placed), resided, choices, means, divided)


def _time_us(device: DeviceSpec, draft: Draft, placed: Placed) -> float:
    train = replace(draft.train, waits=synchronise(draft.train, draft.buffers, placed.offsets))
    return simulate(train, contention=contention(train, draft.buffers, device))


def _with_free_workspace(table: CandidateTable, most: Mapping[str, int], way: _Way, room_bytes: int) -> Draft:
    """The same decisions and layouts; every operation takes what workspace is free where it runs, again included."""
    free = _free(way.resided.draft, room_bytes)
    slices: dict[str, Sequence[Slice]] = {}
    operations = {op.name: op for op in (*way.choices.train, *way.choices.infer) if not kind_of(op).view}
    for name, operation in operations.items():
        if name in way.divided or name not in most:  # what was gathered needs none
            continue
        choice = way.choices.operations[name]
        limit = min(most[name], free.get(name, most[name]))
        menu = table.menus(operation)[choice.layouts]
        # Where nothing is small enough, the smallest.
        point = ([point for point in menu if aligned(point.workspace_bytes) <= limit] or menu[:1])[-1]
        if point is not choice.point:
            slices[name] = point.slices
    return rechosen(table, way.resided.draft, operations, slices)


def _free(draft: Draft, room_bytes: int) -> Mapping[str, int]:
    """Bytes that each operation finds free beside all that is kept while it runs; below zero where that is too much."""
    persistent = frozenset(draft.persistent)
    room_bytes -= persistent_bytes(draft)
    found: dict[str, int] = {}
    for program in (draft.train, draft.infer):
        kept = [b for b in blocks(program, draft.buffers, persistent) if draft.buffers[b.buffers[0]].value is not None]
        live = live_bytes(kept, len(program.launches))
        for launch, taken_bytes in zip(program.launches, live, strict=True):
            if launch.operations:
                name = SEPARATOR.join(launch.operations)
                found[name] = min(found.get(name, UNLIMITED_BYTES), room_bytes - taken_bytes)
    return found
