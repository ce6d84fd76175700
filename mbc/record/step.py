"""A recorded training step: nodes mapped to the launches of a plan, with medians over the replays.

The mapping is exact: each node belongs to the launch that added it while the graph was captured, and each event
belongs to the replay whose call it names.
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
_NS = 1e-3  # one nanosecond in microseconds
_OLDER = "CUPTI must not be newer than the driver: `mbc doctor` shows both"


@dataclass(frozen=True, slots=True)
class RecordedLaunch:
    """The recorded work of one launch. Times are medians over the replays, in microseconds.

    Attributes:
        kernels: Names of the work of its nodes, in the order of their starts.
        streams: Numbers of the GPU's streams that ran its nodes.
        start_us: Time from the begin of the step to the launch's first start.
        time_us: Time from the first start to the last end.
        gap_us: Idle time before it on the launch's stream of the plan, or since the begin of the step.
    """

    kernels: tuple[str, ...]
    streams: tuple[int, ...]
    start_us: float
    time_us: float
    gap_us: float


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The recorded work of a training step.

    Attributes:
        steps: Number of replays.
        step_us: Median time of a replay.
        launches: The work of each launch, in the plan's order; None for launches of which nothing was recorded.
        left: Other work of the step's graph, which no launch added: how often each name ran in a replay.
    """

    steps: int
    step_us: float
    launches: tuple[RecordedLaunch | None, ...]
    left: Mapping[str, float]


def recorded_step(plan: Plan, events: Sequence[Event], warm: int) -> RecordedStep:
    """Return the medians over the replays of the training step.

    Args:
        plan: The plan whose launches the events name.
        events: All events, in the order of their starts.
        warm: Number of replays to leave out at the begin; the last replay always counts.

    Raises:
        MbcError: MBC366 if no training step was recorded completely.
    """
    replays: dict[int, list[Event]] = {}
    for event in events:
        if event.program == PROGRAM:
            replays.setdefault(event.call, []).append(event)
    if not replays:
        among = f"among {len(events):,} records of graphs" if events else "and no other work of graphs"
        raise MbcError("MBC366", f"CUPTI recorded no node of a training step's graph {among}", _OLDER)
    nodes = {event.node for replay in replays.values() for event in replay}
    whole = [replay for replay in replays.values() if sorted(event.node for event in replay) == sorted(nodes)]
    if not whole:
        fewest = min(map(len, replays.values()))
        raise MbcError("MBC366", f"CUPTI recorded {fewest:,} of {len(nodes):,} nodes of a training step", _OLDER)
    counted = whole[min(warm, len(whole) - 1) :]
    graphs = {event.graph for event in counted[0]}
    others = Counter(event.name for event in events if event.program is None and event.graph in graphs)
    steps = [_Step.of(plan, replay) for replay in counted]
    launches = tuple(_median(runs) for runs in zip(*(step.launches for step in steps), strict=True))
    left = {name: count / len(replays) for name, count in others.items()}
    return RecordedStep(len(steps), median(step.time_us for step in steps), launches, left)


@dataclass(frozen=True, slots=True)
class _Step:
    """One replay: its time and the work of each launch; None for launches of which nothing was recorded."""

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


def _median(replays: Sequence[RecordedLaunch | None]) -> RecordedLaunch | None:
    runs = [launch for launch in replays if launch is not None]
    if not runs:
        return None
    first = runs[0]
    times = zip(*((launch.start_us, launch.time_us, launch.gap_us) for launch in runs), strict=True)
    return RecordedLaunch(first.kernels, first.streams, *map(median, times))
