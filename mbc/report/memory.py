"""The memory of a program as a curve in text."""

from __future__ import annotations

from collections.abc import Sequence

from mbc.hardware.streams import STREAM_TO
from mbc.plan.memory import MemoryCurve, memory_curve, outside_curve
from mbc.plan.model import Plan, Program
from mbc.units import show_size

_BLOCKS = " ▁▂▃▄▅▆▇█"
_LABEL = 18


def sparkline(values: Sequence[int], width: int, top: int | None = None) -> str:
    """Draw values as at most `width` blocks; each block shows the largest of its part of the values.

    Args:
        values: Values, at least 0.
        width: Number of characters.
        top: Value of a full block; None for the largest value. A value above 0 is always visible.
    """
    if not values:
        return ""
    top = max(values) if top is None else top
    count = min(width, len(values))
    highest = [max(values[len(values) * i // count : max(1, len(values) * (i + 1) // count)]) for i in range(count)]
    steps = len(_BLOCKS) - 1
    return "".join(_BLOCKS[min(steps, -(-value * steps // top)) if top else 0] for value in highest)


def curve_text(plan: Plan, program: Program, width: int) -> str:
    """Draw the bytes over the launches: all and by kind on one scale, host memory and a peer's on their own scales."""
    curve = memory_curve(plan, program)
    total = curve.total_bytes
    left = plan.arena_budget_bytes
    peak = max(total)
    # A budget far above the peak would make every curve flat.
    top = left if peak <= left < _FAR * peak else peak
    budget = f"; the budget of the arena is {show_size(left)}" if plan.is_timed else ""
    scale = "the budget of the arena" if top == left else f"the peak{budget}"
    room = max(10, width - _LABEL - 12)
    title = f"memory over the {len(total)} launches; the scale ends at {show_size(top)}, {scale}"
    lines = [title, _row("all", total, room, top)]
    lines += [
        _row(kind, taken, room, top) for kind, taken in curve.bytes_by_kind.items() if max(taken) * _NOTHING >= top
    ]
    for space in STREAM_TO:
        outside = outside_curve(plan, program, space)
        if any(outside):
            lines.append(_row(f"{space}, own scale", outside, room, max(outside)))
    return "\n".join(lines)


_FAR = 4
_NOTHING = 1000  # kinds below this part of the scale have no row


def _row(title: str, values: Sequence[int], room: int, top: int) -> str:
    return f"{title:<{_LABEL}}{sparkline(values, room, top)} {show_size(max(values))}"


def curve_rows(curve: MemoryCurve) -> list[dict[str, int]]:
    """Return the bytes by kind at every launch, for pictures and scripts."""
    return [{str(kind): taken for kind, taken in curve.at(i).items()} for i in range(len(curve.total_bytes))]
