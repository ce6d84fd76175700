"""Decisions (a value is kept, recomputed or offloaded between two uses), and the program that carries them out.

A decision starts a new stay of a value at some run: a use reads the stay that started last before it, and a stay lasts
until its last use. So whatever is decided, the program computes the same; memory and time are what changes. A value is
recomputed by the same kernels on the same slices from the same bytes: recomputation is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mbc.hardware.transfers import HostLink
from mbc.ir.types import DType, Layout
from mbc.optimize.remat.fused_remat import FusedRematRun, FusedRematRuns
from mbc.optimize.schedule.emit_launches import WHOLE, Draft, renumbered
from mbc.optimize.schedule.regions import Run
from mbc.plan.model import Access, Buffer, Copy, Launch, Mode, Space, Stream


@dataclass(frozen=True, slots=True)
class Recompute:
    """`buffer` is recomputed just before run `before`, by the run that made it first, from the values that are live
    then."""

    buffer: int
    before: int


@dataclass(frozen=True, slots=True)
class Offload:
    """`buffer` is copied to the host, listed just before run `out`, and back, listed just before run `back`.

    A copy starts as soon as its stream and what it waits for allow, so the places in the list say for how long bytes of
    the arena are taken: until `out`, and from `back` on.
    """

    buffer: int
    out: int
    back: int


@dataclass(frozen=True, slots=True)
class Decisions:
    """In the order of buffers and runs; empty: everything is kept."""

    recomputes: tuple[Recompute, ...] = ()
    offloads: tuple[Offload, ...] = ()


@dataclass(frozen=True, slots=True)
class Rewritten:
    """`position[i]`: the run at which launch i of the training program stands, itself or by a decision. New buffers
    have the highest numbers (see `in_launch_order`)."""

    draft: Draft
    position: tuple[int, ...]


def rewrite(
    draft: Draft, runs: Sequence[Run], decisions: Decisions, link: HostLink, fused_remat: FusedRematRuns | None = None
) -> Rewritten:
    """The draft with the decisions carried out in its training program. `draft` must not alias but by updates. What is
    recomputed according to `fused_remat` (fused rematerialization) has no launch of its own."""
    writer = _Writer(draft, runs, link)
    made_by = {buffer: i for i, run in enumerate(runs) for buffer in run.writes}
    again: dict[int, dict[int, list[int]]] = {}  # position -> run -> outputs
    instead: dict[int, FusedRematRun] = {}  # by the run in whose place it is launched
    repeated = {(made_by[decision.buffer], decision.before) for decision in decisions.recomputes}
    for decision in decisions.recomputes:
        run = made_by[decision.buffer]
        assert run < decision.before and runs[run].again
        found = (fused_remat or {}).get((run, decision.before))
        found = found.beside(repeated) if found else None
        if found and decision.buffer in found.targets:
            # Of two values at the same reductions, the launch that recomputes both replaces the one that recomputes
            # one.
            instead[found.sums] = max(found, instead.get(found.sums, found), key=lambda one: len(one.targets))
        else:
            again.setdefault(decision.before, {}).setdefault(run, []).append(decision.buffer)
    out: dict[int, list[int]] = {}
    back: dict[int, list[int]] = {}
    for decision in decisions.offloads:
        assert decision.out <= decision.back
        out.setdefault(decision.out, []).append(decision.buffer)
        back.setdefault(decision.back, []).append(decision.buffer)
    for position, run in enumerate(runs):
        for buffer in out.get(position, ()):
            writer.to_host(buffer, position)
        for buffer in back.get(position, ()):
            writer.to_device(buffer, position)
        for clone, outputs in sorted(again.get(position, {}).items()):
            writer.run(runs[clone], position, outputs)
        if position in instead:
            writer.fused_remat(instead[position], position)
        else:
            writer.run(run, position, None)
    return writer.finish()


def in_launch_order(draft: Draft) -> Draft:
    """The same draft with the numbers of buffers as its launches first touch them: in a plan a buffer may take over the
    bytes of one with a lower number only."""
    numbers = dict.fromkeys((*draft.persistent, *draft.train.entry))
    numbers |= dict.fromkeys(access.buffer for launch in draft.train.launches for access in launch.accesses)
    numbers |= dict.fromkeys(range(len(draft.buffers)))
    return renumbered(draft, tuple(numbers))


class _Writer:
    """Writes the new training program. `_now` is where the latest stay of a value lies."""

    def __init__(self, draft: Draft, runs: Sequence[Run], link: HostLink) -> None:
        self._draft = draft
        self._runs = runs
        self._link = link
        self._buffers = list(draft.buffers)
        self._launches: list[Launch] = []
        self._position: list[int] = []
        self._now: dict[int, int] = {}
        self._host: dict[int, int] = {}

    def to_host(self, buffer: int, position: int) -> None:
        if buffer not in self._host:  # a value never changes, so one copy serves every return
            self._host[buffer] = self._new(replace(self._draft.buffers[buffer], space=Space.HOST, alias=None))
            self._copy(self._now.get(buffer, buffer), self._host[buffer], Stream.TO_HOST, position)

    def to_device(self, buffer: int, position: int) -> None:
        returned = self._new(self._alone(buffer))
        self._copy(self._host[buffer], returned, Stream.TO_DEVICE, position)
        self._now[buffer] = returned

    def run(self, run: Run, position: int, again: Sequence[int] | None) -> None:
        """The launches of a run; `again`: as a repetition of which these outputs are wanted."""
        moved: dict[int, int] = {}
        launches = self._draft.train.launches[run.start : run.stop]
        if again is not None:
            launches = launches if run.repeat is None else (run.repeat,)
            moved = {buffer: self._new(self._alone(buffer)) for buffer in run.made_again}
        for launch in launches:
            self._add(self._renamed(launch, moved, again is not None), position)
        if again is not None:
            self._now |= {buffer: moved[buffer] for buffer in again}

    def fused_remat(self, fused_remat: FusedRematRun, position: int) -> None:
        """Fused rematerialization: a launch that recomputes values together with its own outputs."""
        made = {target: self._new(self._alone(target)) for target in fused_remat.targets}
        launch = self._renamed(fused_remat.launch, {}, again=False)
        accesses = [Access(made.get(a.buffer, a.buffer), a.rows, a.mode) for a in launch.accesses]
        if fused_remat.workspace_bytes:
            scratch = Buffer(None, WHOLE, Layout.CHANNELS_FIRST, DType.UINT8, fused_remat.workspace_bytes)
            accesses.append(Access(self._new(scratch), WHOLE, Mode.WRITE))
        self._add(replace(launch, accesses=tuple(accesses)), position)
        self._now |= made

    def finish(self) -> Rewritten:
        program = replace(
            self._draft.train,
            launches=tuple(self._launches),
            exit=tuple(self._now.get(buffer, buffer) for buffer in self._draft.train.exit),
        )
        draft = replace(self._draft, buffers=tuple(self._buffers), train=program)
        return Rewritten(draft, tuple(self._position))

    def _alone(self, buffer: int) -> Buffer:
        """With bytes of its own."""
        found = self._draft.buffers[buffer]
        return found if found.alias is None else replace(found, alias=None)

    def _renamed(self, launch: Launch, moved: dict[int, int], again: bool) -> Launch:
        if not again and self._now.keys().isdisjoint([access.buffer for access in launch.accesses]):
            return launch
        accesses: list[Access] = []
        changed = False
        for access in launch.accesses:
            buffer = access.buffer
            if access.mode is Mode.READ:
                buffer = moved.get(buffer, self._now.get(buffer, buffer))
            elif again:
                # What a repetition writes is new, its workspace and the values inside it included.
                if buffer not in moved:
                    moved[buffer] = self._new(self._draft.buffers[buffer])
                buffer = moved[buffer]
            if buffer != access.buffer:
                changed = True
                access = Access(buffer, access.rows, access.mode)
            accesses.append(access)
        return Launch(launch.work, launch.operations, launch.stream, tuple(accesses)) if changed else launch

    def _copy(self, source: int, target: int, stream: Stream, position: int) -> None:
        rows = self._buffers[source].rows
        accesses = (Access(source, rows, Mode.READ), Access(target, rows, Mode.WRITE))
        work = Copy(self._link.copy_us(self._buffers[source].size_bytes, stream), self._link.measured)
        self._add(Launch(work, (), stream, accesses), position)

    def _add(self, launch: Launch, position: int) -> None:
        self._launches.append(launch)
        self._position.append(position)

    def _new(self, buffer: Buffer) -> int:
        self._buffers.append(buffer)
        return len(self._buffers) - 1
