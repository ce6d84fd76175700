"""Random valid plans that send values to host memory and back, and compute other values a second time.

They are written by hand, and are as simple as `tests.plan.chains`: they share nothing with `mbc.optimize` or the
verifier.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from mbc.hardware.streams import Space, Stream
from mbc.ir.graph import TrainingGraph
from mbc.ops import KINDS
from mbc.plan.model import Access, Buffer, Copy, Kernel, Launch, Mode, Plan, Program, Rows
from tests.plan.chains import owner, random_plan

MOST_CHANGES = 5


def offloaded_plan(seed: int, streams: tuple[Stream, ...] = (Stream.COMPUTE,)) -> Plan:
    """Return a plan that offloads values, recomputes values, and does both with some of them.

    `streams` are those of kernels.
    """
    return random_plan(seed, streams, layers=2 + seed % 2, rewrite=rewritten)


def rewritten(graph: TrainingGraph, buffers: list[Buffer], program: Program, rng: random.Random) -> Program:
    """Return the program with some buffers offloaded or recomputed between uses. New buffers go into `buffers`."""
    operations = {op.name: op for op in (*graph.train, *graph.infer)}
    done = 0
    for attempt in range(8 * MOST_CHANGES):
        gaps = list(_gaps(buffers, program))
        if not gaps or done == MOST_CHANGES:
            break
        buffer, first, last = rng.choice(gaps)
        # The first one is a copy wherever there is a gap at all.
        if attempt == 0 or rng.random() < 0.5:
            program, done = _offload(graph, buffers, program, rng, buffer, first, last), done + 1
        else:
            changed = _recompute(operations, buffers, program, rng, buffer, first, last)
            program, done = (program, done) if changed is None else (changed, done + 1)
    return program


def _gaps(buffers: list[Buffer], program: Program):
    """Yield (buffer, a use, the next use) of buffers with bytes of their own that are only read from then on."""
    groups: dict[int, set[int]] = {}
    uses: dict[int, dict[int, set[Mode]]] = {b: {-1: {Mode.WRITE}} for b in program.entry}
    for i, launch in enumerate(program.launches):
        for access in launch.accesses:
            uses.setdefault(access.buffer, {}).setdefault(i, set()).add(access.mode)
    for b in uses:
        groups.setdefault(owner(buffers, b), set()).add(b)
    for b, launches in sorted(uses.items()):
        own = len(groups[owner(buffers, b)]) == 1 and buffers[b].value is not None
        # What must be there at the end stays where it is; that is true of the states too.
        if not own or b in program.exit or buffers[b].space is not Space.ARENA:
            continue
        places = sorted(launches)
        for first, last in itertools.pairwise(places):
            if all(launches[p] == {Mode.READ} for p in places if p >= last):
                yield b, first, last


def _offload(
    graph: TrainingGraph, buffers: list[Buffer], program: Program, rng: random.Random, b: int, first: int, last: int
) -> Program:
    """Return the program with a buffer sent to the host after `first` and back before `last`."""
    away, back = len(buffers), len(buffers) + 1
    buffers += [replace(buffers[b], space=Space.HOST), buffers[b]]
    out = _copies(graph, buffers, rng, b, away, Stream.TO_HOST)
    home = _copies(graph, buffers, rng, away, back, Stream.TO_DEVICE)
    prefetch = rng.randrange(first + 1, last + 1)
    launches: list[Launch] = []
    for i, launch in enumerate(program.launches):
        launches += out if i == first + 1 else ()
        launches += home if i == prefetch else ()
        launches.append(_renamed(launch, {b: back}) if i >= last else launch)
    return replace(program, launches=tuple(launches))


def _copies(
    graph: TrainingGraph, buffers: list[Buffer], rng: random.Random, source: int, target: int, stream: Stream
) -> list[Launch]:
    rows = buffers[source].rows
    parts = [rows]
    value = buffers[source].value
    if value is not None and graph.values[value].per_sample and rows.count > 1 and rng.random() < 0.4:
        cut = rng.randrange(rows.start + 1, rows.stop)
        parts = [Rows(rows.start, cut), Rows(cut, rows.stop)]
    return [
        Launch(
            Copy(rng.randrange(1, 50) / 2, False),
            (),
            stream,
            (Access(source, part, Mode.READ), Access(target, part, Mode.WRITE)),
        )
        for part in parts
    ]


def _recompute(
    operations, buffers: list[Buffer], program: Program, rng: random.Random, b: int, first: int, last: int
) -> Program | None:
    """Return the launches that compute `b` a second time before `last`, or None if that is impossible."""
    writers = [i for i, launch in enumerate(program.launches) if b in _written(launch)]
    if not writers or writers[-1] > first:
        return None
    producers = [program.launches[i] for i in writers]
    if any(isinstance(x.work, Copy) for x in producers):
        return None  # what came back from the host may leave again, but is not copied a second time
    if any(KINDS[operations[name].kind].updates for x in producers for name in x.operations):
        return None
    place = rng.randrange(first + 1, last + 1)
    new: dict[int, int] = {}
    for launch in producers:
        for access in launch.accesses:
            if access.mode is Mode.READ and not _is_intact(buffers, program, access.buffer, writers[-1], place):
                return None
            if access.mode is not Mode.READ and access.buffer not in new:
                new[access.buffer] = len(buffers) + len(new)
    buffers += [replace(buffers[old], alias=None) for old in new]
    clones = [_renamed(launch, new, reads=False) for launch in producers]
    launches = list(program.launches)
    launches[last:] = [_renamed(launch, {b: new[b]}) for launch in launches[last:]]
    launches[place:place] = clones
    return replace(program, launches=tuple(launches))


def _is_intact(buffers: list[Buffer], program: Program, b: int, first: int, place: int) -> bool:
    """Return whether no buffer overwrites the bytes of `b` between launches `first` and `place`."""
    written = (w for launch in program.launches[first:place] for w in _written(launch) if w != b)
    return all(owner(buffers, w) != owner(buffers, b) for w in written)


def _written(launch: Launch) -> set[int]:
    return {access.buffer for access in launch.accesses if access.mode is not Mode.READ}


def _renamed(launch: Launch, new: dict[int, int], reads: bool = True) -> Launch:
    """Return the launch with other buffers; inputs are replaced only if `reads`."""
    return replace(
        launch,
        accesses=tuple(
            replace(a, buffer=new.get(a.buffer, a.buffer)) if reads or a.mode is not Mode.READ else a
            for a in launch.accesses
        ),
    )


def copies(program: Program) -> int:
    """Return the number of copies between the arena and host memory."""
    return sum(launch.stream is not Stream.COMPUTE for launch in program.launches)


def recomputations(program: Program) -> int:
    """Return the number of launches that run rows of an operation a second time."""
    seen: set[tuple[str, ...]] = set()
    again = 0
    for launch in program.launches:
        if isinstance(launch.work, Kernel) and launch.operations:
            rows = max(((a.rows.start, a.rows.stop) for a in launch.accesses), key=lambda r: r[1] - r[0])
            key = (*launch.operations, str(rows))
            again += key in seen
            seen.add(key)
    return again
