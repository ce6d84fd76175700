"""Decisions (a value is kept, recomputed or offloaded between two uses), and the program that carries them out.

A decision starts a new live range of a value at some region: a use reads the live range that started last before it,
and a live range lasts until its last use. So decisions never change the results of the program, only memory and time. A
value is recomputed by the same kernels on the same micro-batches from the same bytes: recomputation is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mbc.hardware.streams import STREAM_FROM, STREAM_TO, Space, Stream
from mbc.hardware.transfers import Links
from mbc.ir.types import DType, Layout
from mbc.optimize.remat.fused_remat import FusedRematLaunch, FusedRematLaunches
from mbc.optimize.schedule.emit_launches import WHOLE, Draft, renumbered
from mbc.optimize.schedule.regions import Region
from mbc.plan.model import Access, Buffer, Launch, Mode, copy_work


@dataclass(frozen=True, slots=True)
class Recompute:
    """A recomputation of `buffer` just before region `before`.

    The region that defines the value recomputes it from the values that are live then.
    """

    buffer: int
    before: int


@dataclass(frozen=True, slots=True)
class Offload:
    """A copy of `buffer` to `space`, listed just before region `out`, and back, listed just before region `back`.

    A copy starts as soon as its stream and its waits allow. So the positions in the list say when the value is live in
    the arena: until `out`, and from `back` on.
    """

    buffer: int
    out: int
    back: int
    space: Space = Space.HOST


@dataclass(frozen=True, slots=True)
class Decisions:
    """Recomputations and offloads in the order of buffers and regions. All other values are kept."""

    recomputes: tuple[Recompute, ...] = ()
    offloads: tuple[Offload, ...] = ()


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A draft with decisions carried out.

    Attributes:
        draft: The draft. New buffers have the highest numbers (see `in_launch_order`).
        position: For each launch of the training program, the region that it belongs to, or that a decision put it
            before.
    """

    draft: Draft
    position: tuple[int, ...]


def rewrite(
    draft: Draft,
    regions: Sequence[Region],
    decisions: Decisions,
    links: Links,
    fused_remat: FusedRematLaunches | None = None,
) -> Rewritten:
    """Return the draft with the decisions carried out in its training program.

    Args:
        draft: A draft whose only aliases are those of updates.
        regions: Regions of the training program.
        decisions: The decisions.
        links: Links that carry copies.
        fused_remat: Fused rematerializations. A value that is recomputed by one has no launch of its own.
    """
    writer = _Writer(draft, links)
    defined_at = {buffer: i for i, region in enumerate(regions) for buffer in region.writes}
    recomputed: dict[int, dict[int, list[int]]] = {}  # position -> region -> outputs
    fused: dict[int, FusedRematLaunch] = {}  # by the region that it replaces
    recomputes = {(defined_at[decision.buffer], decision.before) for decision in decisions.recomputes}
    for decision in decisions.recomputes:
        region = defined_at[decision.buffer]
        assert region < decision.before and regions[region].recomputable
        fused_launch = (fused_remat or {}).get((region, decision.before))
        if fused_launch and fused_launch.is_possible(recomputes) and decision.buffer == fused_launch.target:
            fused[fused_launch.reductions] = fused_launch
        else:
            recomputed.setdefault(decision.before, {}).setdefault(region, []).append(decision.buffer)
    out: dict[int, list[Offload]] = {}
    back: dict[int, list[int]] = {}
    for decision in decisions.offloads:
        assert decision.out <= decision.back
        out.setdefault(decision.out, []).append(decision)
        back.setdefault(decision.back, []).append(decision.buffer)
    for position, region in enumerate(regions):
        for offload in out.get(position, ()):
            writer.send(offload.buffer, offload.space, position)
        for buffer in back.get(position, ()):
            writer.fetch(buffer, position)
        for clone, outputs in sorted(recomputed.get(position, {}).items()):
            writer.region(regions[clone], position, outputs)
        if position in fused:
            writer.fused_remat(fused[position], position)
        else:
            writer.region(region, position, None)
    return writer.finish()


def in_launch_order(draft: Draft) -> Draft:
    """Return the draft with buffers numbered in the order in which its launches first touch them.

    In a plan a buffer may alias one with a lower number only.
    """
    numbers = dict.fromkeys((*draft.persistent, *draft.train.entry))
    numbers |= dict.fromkeys(access.buffer for launch in draft.train.launches for access in launch.accesses)
    numbers |= dict.fromkeys(range(len(draft.buffers)))
    return renumbered(draft, tuple(numbers))


class _Writer:
    """Writes the new training program. `_now` is the buffer of the latest live range of each value."""

    def __init__(self, draft: Draft, links: Links) -> None:
        """Start an empty program."""
        self._draft = draft
        self._links = links
        self._buffers = list(draft.buffers)
        self._launches: list[Launch] = []
        self._position: list[int] = []
        self._now: dict[int, int] = {}
        self._away: dict[int, int] = {}  # the buffer of a value outside the arena

    def send(self, buffer: int, space: Space, position: int) -> None:
        if buffer not in self._away:  # a value never changes, so one copy serves every prefetch
            self._away[buffer] = self._new(replace(self._draft.buffers[buffer], space=space, alias=None))
            self._copy(self._now.get(buffer, buffer), self._away[buffer], STREAM_TO[space], position)

    def fetch(self, buffer: int, position: int) -> None:
        away, returned = self._away[buffer], self._new(self._alone(buffer))
        self._copy(away, returned, STREAM_FROM[self._buffers[away].space], position)
        self._now[buffer] = returned

    def region(self, region: Region, position: int, recomputed: Sequence[int] | None) -> None:
        """Add the launches of a region; with `recomputed`, as a recomputation that only these outputs are read from."""
        renamed: dict[int, int] = {}
        launches = self._draft.train.launches[region.start : region.stop]
        if recomputed is not None:
            launches = launches if region.remat_launch is None else (region.remat_launch,)
            renamed = {buffer: self._new(self._alone(buffer)) for buffer in region.recomputed_outputs}
        for launch in launches:
            self._add(self._renamed(launch, renamed, recomputed is not None), position)
        if recomputed is not None:
            self._now |= {buffer: renamed[buffer] for buffer in recomputed}

    def fused_remat(self, fused_remat: FusedRematLaunch, position: int) -> None:
        """Add a launch that recomputes a value together with its own outputs (fused rematerialization)."""
        renamed = {fused_remat.target: self._new(self._alone(fused_remat.target))}
        launch = self._renamed(fused_remat.launch, {}, recomputed=False)
        accesses = [Access(renamed.get(a.buffer, a.buffer), a.rows, a.mode) for a in launch.accesses]
        if fused_remat.workspace_bytes:
            scratch = Buffer(None, WHOLE, Layout.CHANNELS_FIRST, DType.UINT8, fused_remat.workspace_bytes)
            accesses.append(Access(self._new(scratch), WHOLE, Mode.WRITE))
        self._add(replace(launch, accesses=tuple(accesses)), position)
        self._now |= renamed

    def finish(self) -> Rewritten:
        program = replace(
            self._draft.train,
            launches=tuple(self._launches),
            exit=tuple(self._now.get(buffer, buffer) for buffer in self._draft.train.exit),
        )
        draft = replace(self._draft, buffers=tuple(self._buffers), train=program)
        return Rewritten(draft, tuple(self._position))

    def _alone(self, buffer: int) -> Buffer:
        """Return a buffer with bytes of its own."""
        original = self._draft.buffers[buffer]
        return original if original.alias is None else replace(original, alias=None)

    def _renamed(self, launch: Launch, renamed: dict[int, int], recomputed: bool) -> Launch:
        if not recomputed and self._now.keys().isdisjoint([access.buffer for access in launch.accesses]):
            return launch
        accesses: list[Access] = []
        changed = False
        for access in launch.accesses:
            buffer = access.buffer
            if access.mode is Mode.READ:
                buffer = renamed.get(buffer, self._now.get(buffer, buffer))
            elif recomputed:
                # All buffers that a recomputation writes are new, its workspace and intermediate values included.
                if buffer not in renamed:
                    renamed[buffer] = self._new(self._draft.buffers[buffer])
                buffer = renamed[buffer]
            if buffer != access.buffer:
                changed = True
                access = Access(buffer, access.rows, access.mode)
            accesses.append(access)
        return Launch(launch.work, launch.operations, launch.stream, tuple(accesses)) if changed else launch

    def _copy(self, source: int, target: int, stream: Stream, position: int) -> None:
        rows = self._buffers[source].rows
        accesses = (Access(source, rows, Mode.READ), Access(target, rows, Mode.WRITE))
        work = copy_work(self._links, self._buffers[source].size_bytes, stream)
        self._add(Launch(work, (), stream, accesses), position)

    def _add(self, launch: Launch, position: int) -> None:
        self._launches.append(launch)
        self._position.append(position)

    def _new(self, buffer: Buffer) -> int:
        self._buffers.append(buffer)
        return len(self._buffers) - 1
