"""The answer on what takes the time of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mbc.analysis.roofline import Bound, Limit
from mbc.hardware.streams import COPY_STREAMS, Stream
from mbc.ops import KINDS
from mbc.ops.base import OpKind
from mbc.report.html.answer import Answer, Line, cut
from mbc.report.html.facts import Facts
from mbc.report.tables import time_cell
from mbc.units import show_time

_LISTED = 5
_COLLECTIVES, _OTHERS = "collectives", "other kernels"
# A fused kernel counts in the first family that one of its operations belongs to.
_FAMILIES: Mapping[str, Callable[[OpKind], bool]] = {
    "convolutions and GEMMs": lambda kind: kind.flops is not None,
    "normalisation": lambda kind: kind.name.startswith(("batch_", "group_norm", "layer_norm", "rms_norm")),
    "updates": lambda kind: bool(kind.updates),
}


def what_takes_the_time(facts: Facts) -> tuple[Answer, ...]:
    """Answer which families of kernels take the time of a step.

    The answer also has the time of recomputing, the cost of copies, and the distance of kernels from their limits.
    There is none for a program without times.
    """
    kernels = [i for i, one in enumerate(facts.summaries) if one.stream not in COPY_STREAMS]
    total_us = sum(facts.summaries[i].time_us for i in kernels)
    if not total_us:
        return ()
    first = [facts.program.launches[one.first_launch] for one in facts.summaries]
    kind_of = {op.name: KINDS[op.kind] for op in (*facts.plan.graph.train, *facts.plan.graph.infer)}
    families: dict[str, list[int]] = {}
    kinds: dict[str, list[int]] = {}
    for i in kernels:
        families.setdefault(_family(first[i].stream, [kind_of[name] for name in first[i].operations]), []).append(i)
        kinds.setdefault(facts.summaries[i].kind, []).append(i)

    def time_us(group: Sequence[int]) -> float:
        return sum(facts.summaries[i].time_us for i in group)

    def share(name: str, group: Sequence[int]) -> str:
        estimated = any(facts.summaries[i].estimated for i in group)
        return f"{name} {time_cell(time_us(group), estimated)} ({100 * time_us(group) / total_us:.0f} %)"

    def most(groups: Mapping[str, list[int]]) -> list[tuple[str, list[int]]]:
        return sorted(groups.items(), key=lambda group: -time_us(group[1]))

    shares = ", ".join(share(*group) for group in most(families))
    recompute_us = sum(one.time_us for one in facts.techniques.recomputed)
    again = f" {show_time(recompute_us)} of this are recomputing." if recompute_us else ""
    copies = f" Copies cost about {show_time(facts.costs.total_us)} more." if facts.costs.copies else ""
    limits = [one for one in facts.limits if one.summary.stream not in COPY_STREAMS]
    all_us = time_cell(total_us, any(facts.summaries[i].estimated for i in kernels))
    return (
        Answer(
            "What takes the time?",
            f"All kernels, serially, take {all_us}: {shares}.{again}{copies}{_nearest(limits)}",
            cut(most(kinds), _LISTED, "kinds that take the most time", lambda group: Line(share(*group))),
            "operations",
        ),
    )


def _family(stream: Stream, members: Sequence[OpKind]) -> str:
    if stream is Stream.COLLECTIVE:
        return _COLLECTIVES
    return next((name for name, belongs in _FAMILIES.items() if any(map(belongs, members))), _OTHERS)


def _nearest(limits: Sequence[Limit]) -> str:
    limit_us = sum(one.limit_us for one in limits)
    if not limit_us:
        return ""
    time_us = {bound: sum(one.summary.time_us for one in limits if one.bound is bound) for bound in Bound}
    parts = [f"{bound} for {show_time(us)}" for bound, us in time_us.items() if us]
    return (
        f" By nearest limit: {', '.join(parts)}. Together the kernels take"
        f" {sum(time_us.values()) / limit_us:.2f} times their limits."
    )
