"""Optimizer states offloaded between steps, to host memory or a peer's: they are in the arena for their update only.

A state of the optimizer is read and written once a step. It is prefetched some time before its update, and its next
version is offloaded some time after; both cost only bandwidth while kernels overlap them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mbc.hardware.streams import STREAM_FROM, STREAM_TO, Space, Stream, aligned
from mbc.hardware.transfers import Links
from mbc.ir.graph import Role, TrainingGraph
from mbc.optimize.schedule.emit_launches import Draft, renumbered
from mbc.optimize.schedule.regions import regions_of
from mbc.plan.model import Access, Buffer, Launch, Mode, Program, copy_work


def movable_states(graph: TrainingGraph, draft: Draft) -> tuple[int, ...]:
    """Return the buffers of the states that at most one region of a step reads: those of the optimizer."""
    values = (draft.buffers[b].value for b in draft.persistent)
    named = (b for b, name in zip(draft.persistent, values, strict=True) if name is not None)
    return tuple(b for b in named if graph.values[draft.buffers[b].value or ""].role is Role.OPTIMIZER)


def largest_update_bytes(graph: TrainingGraph) -> int:
    """Return the most bytes of movable states that one operation needs together.

    At some time at least these bytes are in the arena.
    """
    movable = {state.value for state in graph.states if graph.values[state.value].role is Role.OPTIMIZER}
    return max(
        sum(aligned(graph.values[name].type.size_bytes) for name in operation.inputs if name in movable)
        for operation in graph.train
    )


def persistent_bytes(draft: Draft) -> int:
    """Return the bytes of the arena that are live all the time."""
    kept = (draft.buffers[b] for b in draft.persistent)
    return sum(aligned(buffer.size_bytes) for buffer in kept if buffer.space is Space.ARENA)


def states_to_offload(
    graph: TrainingGraph, draft: Draft, wanted_bytes: int, room_bytes: Mapping[Space, int], links: Links
) -> Mapping[int, Space]:  # fmt: skip
    """Return the largest movable states, up to a number of bytes, and the space of each.

    A state goes over the fastest link with enough memory behind it.

    Args:
        graph: The training graph.
        draft: Launches and buffers.
        wanted_bytes: Bytes after which no more states are chosen.
        room_bytes: Bytes that may be offloaded, by space.
        links: Links that carry copies.
    """
    chosen: dict[int, Space] = {}
    left_bytes = dict(room_bytes)
    for state in sorted(movable_states(graph, draft), key=lambda b: (-draft.buffers[b].size_bytes, b)):
        size_bytes = aligned(draft.buffers[state].size_bytes)
        space = next((space for space in links.fastest(room_bytes) if size_bytes <= left_bytes[space]), None)
        if wanted_bytes > 0 and space is not None:
            chosen[state] = space
            left_bytes[space] -= size_bytes
            wanted_bytes -= size_bytes
    return dict(sorted(chosen.items()))


def offload_states(
    graph: TrainingGraph, draft: Draft, states: Mapping[int, Space], links: Links, lead: float
) -> Draft:  # fmt: skip
    """Return the draft with persistent buffers outside the arena.

    Each is prefetched for its uses and, where a program computes its next version, offloaded again.

    Args:
        graph: The training graph.
        draft: Launches and buffers.
        states: The buffers, and the space of each.
        links: Links that carry copies.
        lead: Time that a state is in the arena before it is needed, and after, in times of its copy. A smaller lead
            takes less memory, but kernels may wait.
    """
    buffers = list(draft.buffers)
    for state, space in states.items():
        buffers[state] = replace(buffers[state], space=space)
    moved = _Programs(buffers, frozenset(states), links, lead)
    # Copies are launched between regions, so that regions stay whole.
    train, infer = (
        moved.program(program, [*(run.start for run in regions_of(graph, draft, program)), len(program.launches)])
        for program in (draft.train, draft.infer)
    )
    offloaded = replace(draft, buffers=tuple(buffers), train=train, infer=infer)
    # A buffer may alias one with a lower number only: numbers follow the launches.
    numbers = dict.fromkeys((*draft.persistent, *train.entry, *infer.entry))
    launches = (*train.launches, *infer.launches)
    numbers |= dict.fromkeys(access.buffer for launch in launches for access in launch.accesses)
    numbers |= dict.fromkeys(range(len(buffers)))
    return renumbered(offloaded, tuple(numbers))


@dataclass
class _LiveRange:
    """Launches [first, last] of a program that need a state.

    Attributes:
        state: The persistent buffer.
        arena: The state's buffer in the arena.
        first: The first launch.
        last: The last launch.
        final: Buffer of the state's next version, if the program computes it.
        away: Buffer of the next version outside the arena.
    """

    state: int
    arena: int
    first: int
    last: int
    final: int | None = None
    away: int = -1


@dataclass
class _Programs:
    """Rewrites programs over one list of buffers."""

    buffers: list[Buffer]
    states: frozenset[int]
    links: Links
    lead: float
    _live_ranges: dict[int, _LiveRange] = field(default_factory=dict[int, _LiveRange])
    _finals: set[int] = field(default_factory=set[int])

    def program(self, old: Program, between: Sequence[int]) -> Program:
        """Return a program with copies at positions of `between`, in order."""
        self._live_ranges, self._finals = {}, set()
        for i, launch in enumerate(old.launches):
            for access in launch.accesses:
                self._touch(access, i)
        starts_us = _starts_us(old.launches)
        before: dict[int, list[Launch]] = {}
        after: dict[int, list[Launch]] = {}
        for live_range in self._live_ranges.values():
            size_bytes, space = self.buffers[live_range.state].size_bytes, self.buffers[live_range.state].space
            fetch_us = self.lead * self.links.copy_us(size_bytes, STREAM_FROM[space])
            position = _position_before(starts_us, live_range.first, fetch_us)
            position = between[bisect_right(between, position) - 1]
            before.setdefault(position, []).append(self._copy(live_range.state, live_range.arena, STREAM_FROM[space]))
            if live_range.final is not None:
                live_range.away = self._new(
                    replace(self.buffers[live_range.final], space=space, alias=live_range.state)
                )
                send_us = self.lead * self.links.copy_us(size_bytes, STREAM_TO[space])
                position = _position_after(starts_us, live_range.last + 1, send_us)
                position = between[bisect_left(between, position)]
                after.setdefault(position, []).append(self._copy(live_range.final, live_range.away, STREAM_TO[space]))
        launches: list[Launch] = []
        for i in range(len(old.launches) + 1):
            # Offloads come first: a prefetched state may get the freed bytes.
            launches += (*after.get(i, ()), *before.get(i, ()))
            launches += [self._renamed(launch) for launch in old.launches[i : i + 1]]
        away = {
            live_range.final: live_range.away
            for live_range in self._live_ranges.values()
            if live_range.final is not None
        }
        return replace(old, launches=tuple(launches), exit=tuple(away.get(b, b) for b in old.exit))

    def _touch(self, access: Access, launch: int) -> None:
        buffer = self.buffers[access.buffer]
        state = access.buffer if access.buffer in self.states else buffer.alias
        if state not in self.states or buffer.value is None:
            assert buffer.alias not in self._finals, "a state has one next version a step"
            return
        assert state is not None
        live_range = self._live_ranges.get(state)
        if live_range is None:
            arena = self._new(replace(self.buffers[state], space=Space.ARENA))
            live_range = self._live_ranges[state] = _LiveRange(state, arena, launch, launch)
        live_range.last = launch
        if access.buffer != state:
            live_range.final = access.buffer
            self._finals.add(access.buffer)
            self.buffers[access.buffer] = replace(buffer, alias=live_range.arena)

    def _renamed(self, launch: Launch) -> Launch:
        if not any(access.buffer in self.states for access in launch.accesses):
            return launch
        accesses = (
            replace(a, buffer=self._live_ranges[a.buffer].arena) if a.buffer in self.states else a
            for a in launch.accesses
        )
        return replace(launch, accesses=tuple(accesses))

    def _copy(self, source: int, target: int, stream: Stream) -> Launch:
        buffer = self.buffers[source]
        work = copy_work(self.links, buffer.size_bytes, stream)
        accesses = (Access(source, buffer.rows, Mode.READ), Access(target, buffer.rows, Mode.WRITE))
        return Launch(work, (), stream, accesses)

    def _new(self, buffer: Buffer) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1


def _starts_us(launches: Sequence[Launch]) -> list[float]:
    """Return when each launch of the compute stream starts if nothing stalls, and the end."""
    starts = [0.0]
    for launch in launches:
        starts.append(starts[-1] + (launch.work.time_us if launch.stream is Stream.COMPUTE else 0.0))
    return starts


def _position_before(starts_us: Sequence[float], launch: int, lead_us: float) -> int:
    """Return the last launch that starts at least `lead_us` before another one."""
    later = bisect_left(starts_us, True, 0, launch + 1, key=lambda start_us: starts_us[launch] - start_us < lead_us)
    return max(0, later - 1)


def _position_after(starts_us: Sequence[float], launch: int, lag_us: float) -> int:
    """Return the first launch that starts at least `lag_us` after another one."""
    last = len(starts_us) - 1
    return bisect_left(starts_us, True, launch, last, key=lambda start_us: start_us - starts_us[launch] >= lag_us)
