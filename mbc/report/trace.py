"""A plan as a trace for Perfetto and chrome://tracing: the predicted step, and the measured one where it was recorded.

Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: events have
microseconds; "X" is a complete event, "M" metadata, "C" a counter, "s" and "f" the ends of an arrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mbc.hardware.streams import Stream
from mbc.plan.group import launch_name, title
from mbc.plan.memory import memory_curve
from mbc.plan.model import Plan, Program
from mbc.plan.summary import grouped, kernel_name
from mbc.report.collectives import ranks_text
from mbc.report.measured import MeasuredStep
from mbc.report.timeline import predicted_timeline

_STREAMS = tuple(Stream)


def trace_document(plan: Plan, measured: MeasuredStep | None = None, others: Sequence[Plan] = ()) -> dict[str, Any]:
    """Return a process for each program, with a thread for each stream, arrows for waits, and live bytes as counters.

    Args:
        plan: Plan.
        measured: Measured training step, shown as one more process; None to leave it out.
        others: Plans of the ranks that do not run `plan`, each shown as one more process.
    """
    network = plan.graph.name
    events = _program(plan, plan.train, 1, f"{network}: training step{_of_ranks(plan)}, predicted")
    events += _program(plan, plan.infer, 2, f"{network}: inference, predicted")
    if measured is not None:
        events += _measured(plan, measured, process=3)
    for process, other in enumerate(others, start=4):
        events += _program(other, other.train, process, f"{network}: training step{_of_ranks(other)}, predicted")
    return {
        "displayTimeUnit": "ms",
        "otherData": {"gpu": plan.target.gpu, "mbc": plan.version, "network": plan.graph.name},
        "traceEvents": events,
    }


def _of_ranks(plan: Plan) -> str:
    ranks = plan.graph.ranks
    return "" if ranks is None else f" of {ranks_text(ranks.members)}"


def _program(plan: Plan, program: Program, process: int, name: str) -> list[dict[str, Any]]:
    times = predicted_timeline(plan, program)
    named = {launch: called for called, group in grouped(plan, program).items() for launch in group}
    used = sorted({_STREAMS.index(launch.stream) for launch in program.launches})
    events: list[dict[str, Any]] = [_metadata_event("process_name", process, 0, name)]
    events += [_metadata_event("thread_name", process, stream, str(_STREAMS[stream])) for stream in used]
    for i, launch in enumerate(program.launches):
        stream = _STREAMS.index(launch.stream)
        event = {"pid": process, "tid": stream, "ts": times.starts_us[i], "cat": str(launch.stream)}
        events.append(
            {
                **event,
                "ph": "X",
                "name": title(launch.operations) or named[i],
                "dur": times.ends_us[i] - times.starts_us[i],
                "args": {
                    "launch": i,
                    "kernel": kernel_name(launch),
                    "alone_us": launch.work.time_us,
                    "measured": launch.work.measured,
                    "stall_us": times.stalls_us[i],
                },
            }
        )
    for number, (earlier, later) in enumerate(program.waits):
        for i, end in ((earlier, "s"), (later, "f")):
            at = times.ends_us[i] if end == "s" else times.starts_us[i]
            stream = _STREAMS.index(program.launches[i].stream)
            arrow = {"ph": end, "id": number, "name": "wait", "cat": "wait", "pid": process, "tid": stream, "ts": at}
            events.append(arrow | ({"bp": "e"} if end == "f" else {}))
    curve = memory_curve(plan, program)
    for i, launch in enumerate(program.launches):
        if launch.stream is Stream.COMPUTE:  # the order of launches is that of time on one stream only
            live = {str(kind): taken for kind, taken in curve.at(i).items()}
            events.append(
                {"ph": "C", "name": "live bytes", "pid": process, "tid": 0, "ts": times.starts_us[i], "args": live}
            )
    return events


def _measured(plan: Plan, measured: MeasuredStep, process: int) -> list[dict[str, Any]]:
    program = plan.train
    used = sorted({_STREAMS.index(launch.stream) for launch in program.launches})
    events: list[dict[str, Any]] = [
        _metadata_event("process_name", process, 0, f"{plan.graph.name}: training step, measured")
    ]
    events += [_metadata_event("thread_name", process, stream, str(_STREAMS[stream])) for stream in used]
    times = zip(program.launches, measured.starts_us, measured.times_us, strict=True)
    for i, (launch, start_us, time_us) in enumerate(times):
        if start_us is not None:
            event = {"ph": "X", "pid": process, "tid": _STREAMS.index(launch.stream), "ts": start_us, "dur": time_us}
            args = {"launch": i, "kernel": kernel_name(launch)}
            events.append({**event, "name": launch_name(i, launch), "cat": str(launch.stream), "args": args})
    return events


def _metadata_event(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
