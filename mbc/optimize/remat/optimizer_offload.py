"""Optimizer states offloaded to host memory between steps: they are in the arena for their update only.

A state of the optimizer is read and written once a step. It is fetched some time before its update, and its
next version has some time to leave; both cost nothing but bandwidth while other work covers them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from mbc.hardware.transfers import HostLink
from mbc.ir.graph import Role, TrainingGraph
from mbc.optimize.schedule.emit_launches import Draft, renumbered
from mbc.optimize.schedule.regions import runs_of
from mbc.plan.model import Access, Buffer, Copy, Launch, Mode, Program, Space, Stream, aligned


def movable_states(graph: TrainingGraph, draft: Draft) -> tuple[int, ...]:
    """Buffers of the states that are read by one run a step at most: those of the optimizer."""
    values = (draft.buffers[b].value for b in draft.persistent)
    found = (b for b, name in zip(draft.persistent, values, strict=True) if name is not None)
    return tuple(b for b in found if graph.values[draft.buffers[b].value or ""].role is Role.OPTIMIZER)


def most_together_bytes(graph: TrainingGraph) -> int:
    """Of the movable states, what one operation needs at once: so much is in the arena at some time in any case."""
    movable = {state.value for state in graph.states if graph.values[state.value].role is Role.OPTIMIZER}
    return max(
        sum(aligned(graph.values[name].type.size_bytes) for name in operation.inputs if name in movable)
        for operation in graph.train
    )


def persistent_bytes(draft: Draft) -> int:
    """Of the arena: what is taken all the time."""
    kept = (draft.buffers[b] for b in draft.persistent)
    return sum(aligned(buffer.size_bytes) for buffer in kept if buffer.space is Space.ARENA)


def states_to_offload(graph: TrainingGraph, draft: Draft, wanted_bytes: int, host_bytes: int) -> tuple[int, ...]:
    """The largest of the movable states, until they are so many bytes, or all that the host memory holds."""
    chosen: list[int] = []
    for state in sorted(movable_states(graph, draft), key=lambda b: (-draft.buffers[b].size_bytes, b)):
        size_bytes = aligned(draft.buffers[state].size_bytes)
        if wanted_bytes > 0 and size_bytes <= host_bytes:
            chosen.append(state)
            host_bytes -= size_bytes
            wanted_bytes -= size_bytes
    return tuple(sorted(chosen))


def offload_states(graph: TrainingGraph, draft: Draft, states: Collection[int], link: HostLink, lead: float) -> Draft:
    """The draft with these persistent buffers in host memory, each fetched for its uses and, where a program makes
    its next version, sent back.

    A state is in the arena for `lead` times of its copy before it is needed, and after: what is shorter takes less
    memory, and kernels may wait.
    """
    buffers = list(draft.buffers)
    for state in states:
        buffers[state] = replace(buffers[state], space=Space.HOST)
    moved = _Programs(buffers, frozenset(states), link, lead)
    # Copies stand between runs, so that runs stay whole.
    train, infer = (
        moved.program(program, [*(run.start for run in runs_of(graph, draft, program)), len(program.launches)])
        for program in (draft.train, draft.infer)
    )
    found = replace(draft, buffers=tuple(buffers), train=train, infer=infer)
    # A buffer may take over the bytes of one with a lower number only: numbers follow the launches.
    numbers = dict.fromkeys((*draft.persistent, *train.entry, *infer.entry))
    launches = (*train.launches, *infer.launches)
    numbers |= dict.fromkeys(access.buffer for launch in launches for access in launch.accesses)
    numbers |= dict.fromkeys(range(len(buffers)))
    return renumbered(found, tuple(numbers))


@dataclass
class _Stay:
    """Launches [first, last] of a program that need a state; `arena`, its place there; `final`, its next version."""

    state: int
    arena: int
    first: int
    last: int
    final: int | None = None
    home: int = -1


@dataclass
class _Programs:
    """Rewrites programs over one list of buffers."""

    buffers: list[Buffer]
    states: frozenset[int]
    link: HostLink
    lead: float
    _stays: dict[int, _Stay] = field(default_factory=dict[int, _Stay])
    _finals: set[int] = field(default_factory=set[int])

    def program(self, old: Program, between: Sequence[int]) -> Program:
        """`between`: places in the list of launches where copies may stand, in order."""
        self._stays, self._finals = {}, set()
        for i, launch in enumerate(old.launches):
            for access in launch.accesses:
                self._touch(access, i)
        starts_us = _starts_us(old.launches)
        before: dict[int, list[Launch]] = {}
        after: dict[int, list[Launch]] = {}
        for stay in self._stays.values():
            size_bytes = self.buffers[stay.state].size_bytes
            fetch_us = self.lead * self.link.copy_us(size_bytes, Stream.TO_DEVICE)
            place = _place_before(starts_us, stay.first, fetch_us)
            place = between[bisect_right(between, place) - 1]
            before.setdefault(place, []).append(self._copy(stay.state, stay.arena, Stream.TO_DEVICE))
            if stay.final is not None:
                stay.home = self._new(replace(self.buffers[stay.final], space=Space.HOST, alias=stay.state))
                send_us = self.lead * self.link.copy_us(size_bytes, Stream.TO_HOST)
                place = _place_after(starts_us, stay.last + 1, send_us)
                place = between[bisect_left(between, place)]
                after.setdefault(place, []).append(self._copy(stay.final, stay.home, Stream.TO_HOST))
        launches: list[Launch] = []
        for i in range(len(old.launches) + 1):
            # What leaves comes first: what is fetched may take its place.
            launches += (*after.get(i, ()), *before.get(i, ()))
            launches += [self._renamed(launch) for launch in old.launches[i : i + 1]]
        homes = {stay.final: stay.home for stay in self._stays.values() if stay.final is not None}
        return replace(old, launches=tuple(launches), exit=tuple(homes.get(b, b) for b in old.exit))

    def _touch(self, access: Access, launch: int) -> None:
        buffer = self.buffers[access.buffer]
        state = access.buffer if access.buffer in self.states else buffer.alias
        if state not in self.states or buffer.value is None:
            assert buffer.alias not in self._finals, "a state has one next version a step"
            return
        assert state is not None
        stay = self._stays.get(state)
        if stay is None:
            arena = self._new(replace(self.buffers[state], space=Space.ARENA))
            stay = self._stays[state] = _Stay(state, arena, launch, launch)
        stay.last = launch
        if access.buffer != state:
            stay.final = access.buffer
            self._finals.add(access.buffer)
            self.buffers[access.buffer] = replace(buffer, alias=stay.arena)

    def _renamed(self, launch: Launch) -> Launch:
        if not any(access.buffer in self.states for access in launch.accesses):
            return launch
        accesses = (
            replace(a, buffer=self._stays[a.buffer].arena) if a.buffer in self.states else a for a in launch.accesses
        )
        return replace(launch, accesses=tuple(accesses))

    def _copy(self, source: int, target: int, stream: Stream) -> Launch:
        buffer = self.buffers[source]
        work = Copy(self.link.copy_us(buffer.size_bytes, stream), self.link.measured)
        accesses = (Access(source, buffer.rows, Mode.READ), Access(target, buffer.rows, Mode.WRITE))
        return Launch(work, (), stream, accesses)

    def _new(self, buffer: Buffer) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1


def _starts_us(launches: Sequence[Launch]) -> list[float]:
    """When each launch of the compute stream would start, were there nothing else; and the end."""
    starts = [0.0]
    for launch in launches:
        starts.append(starts[-1] + (launch.work.time_us if launch.stream is Stream.COMPUTE else 0.0))
    return starts


def _place_before(starts_us: Sequence[float], launch: int, lead_us: float) -> int:
    """The last launch that starts so long before another one."""
    place = launch
    while place > 0 and starts_us[launch] - starts_us[place] < lead_us:
        place -= 1
    return place


def _place_after(starts_us: Sequence[float], launch: int, lag_us: float) -> int:
    """The first launch that starts so long after another one."""
    place = launch
    while place < len(starts_us) - 1 and starts_us[place] - starts_us[launch] < lag_us:
        place += 1
    return place
