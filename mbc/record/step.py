"""The training step as it was recorded: nodes to the launches of a plan, medians over the replays.

Exact: each node is of the launch that added it while the graph was captured, and each event of the replay whose call it
names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from mbc.errors import MbcError
from mbc.plan.model import Plan
from mbc.record.recorder import Event

PROGRAM = "train"
_NS = 1e-3  # in microseconds
_OLDER = "CUPTI must not be newer than the driver: `mbc doctor` shows both"


@dataclass(frozen=True, slots=True)
class RecordedLaunch:
    """`kernels`: names of what its nodes run, in the order of their starts; `streams`: numbers of the GPU's streams
    that ran them. Times are medians: `start_us` since the step began, `time_us` from the first start to the last end,
    `gap_us` after what the launch's stream of the plan did before, or since the step began."""

    kernels: tuple[str, ...]
    streams: tuple[int, ...]
    start_us: float
    time_us: float
    gap_us: float


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Of `steps` replays, launch by launch in the plan's order; None of launches of which nothing was recorded. `left`:
    what else the step's graph ran, by name, which no launch added: how often a replay."""

    steps: int
    step_us: float
    launches: tuple[RecordedLaunch | None, ...]
    left: Mapping[str, float]


def recorded_step(plan: Plan, events: Sequence[Event], warm: int) -> RecordedStep:
    """`events` by time; the first `warm` replays are left out, but for the last one. MBC366 where no training step was
    recorded as a whole."""
    replays: dict[int, list[Event]] = {}
    for event in events:
        if event.program == PROGRAM:
            replays.setdefault(event.call, []).append(event)
    if not replays:
        among = f"among {len(events):,} records of graphs" if events else "and nothing else that graphs run"
        raise MbcError("MBC366", f"CUPTI recorded no node of a training step's graph {among}", _OLDER)
    nodes = {event.node for replay in replays.values() for event in replay}
    whole = [replay for replay in replays.values() if sorted(event.node for event in replay) == sorted(nodes)]
    if not whole:
        found = min(map(len, replays.values()))
        raise MbcError("MBC366", f"CUPTI recorded {found:,} of {len(nodes):,} nodes of a training step", _OLDER)
    counted = whole[min(warm, len(whole) - 1) :]
    graphs = {event.graph for event in counted[0]}
    others = Counter(event.name for event in events if event.program is None and event.graph in graphs)
    steps = [_Step.of(plan, replay) for replay in counted]
    launches = tuple(_median(runs) for runs in zip(*(step.launches for step in steps), strict=True))
    left = {name: count / len(replays) for name, count in others.items()}
    return RecordedStep(len(steps), median(step.time_us for step in steps), launches, left)


@dataclass(frozen=True, slots=True)
class _Step:
    """One replay. Of each launch what it ran; empty where that is nothing."""

    time_us: float
    launches: tuple[RecordedLaunch | None, ...]

    @staticmethod
    def of(plan: Plan, events: Sequence[Event]) -> _Step:
        began = min(event.start_ns for event in events)
        parts: list[list[Event]] = [[] for _ in plan.train.launches]
        for event in sorted(events, key=lambda event: event.start_ns):
            assert event.launch is not None
            parts[event.launch].append(event)
        free = {launch.stream: began for launch in plan.train.launches}
        launches: list[RecordedLaunch | None] = []
        for launch, part in zip(plan.train.launches, parts, strict=True):
            if not part:
                launches.append(None)
                continue
            start, end = part[0].start_ns, max(event.end_ns for event in part)
            streams = tuple(sorted({event.stream for event in part}))
            times = (start - began, end - start, start - free[launch.stream])
            free[launch.stream] = end
            launches.append(RecordedLaunch(tuple(e.name for e in part), streams, *(ns * _NS for ns in times)))
        return _Step((max(event.end_ns for event in events) - began) * _NS, tuple(launches))


def _median(found: Sequence[RecordedLaunch | None]) -> RecordedLaunch | None:
    runs = [launch for launch in found if launch is not None]
    if not runs:
        return None
    first = runs[0]
    times = zip(*((launch.start_us, launch.time_us, launch.gap_us) for launch in runs), strict=True)
    return RecordedLaunch(first.kernels, first.streams, *map(median, times))
