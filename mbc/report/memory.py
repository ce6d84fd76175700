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
    """`values` as at most `width` blocks: each shows the largest of its share of the values, against `top` (default:
    the largest of all). What is not zero is never shown as nothing."""
    if not values:
        return ""
    top = max(values) if top is None else top
    count = min(width, len(values))
    highest = [max(values[len(values) * i // count : max(1, len(values) * (i + 1) // count)]) for i in range(count)]
    steps = len(_BLOCKS) - 1
    return "".join(_BLOCKS[min(steps, -(-value * steps // top)) if top else 0] for value in highest)


def curve_text(plan: Plan, program: Program, width: int) -> str:
    """One part of a page: the arena over the launches of a program against the budget, in all and by kind, on one
    scale; host memory and a peer's on their own."""
    curve = memory_curve(plan, program)
    total = curve.total_bytes
    left = plan.arena_budget_bytes
    peak = max(total)
    # Against a budget that is far away every curve would lie flat on the ground.
    top = left if peak <= left < _FAR * peak else peak
    scale = "that the budget leaves" if top == left else f"at the peak; the budget leaves {show_size(left)}"
    room = max(10, width - _LABEL - 12)
    title = f"memory over the {len(total)} launches; the scale ends at the {show_size(top)} {scale}"
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
_NOTHING = 1000  # what takes less than this part of the scale has no row


def _row(title: str, values: Sequence[int], room: int, top: int) -> str:
    return f"{title:<{_LABEL}}{sparkline(values, room, top)} {show_size(max(values))}"


def curve_rows(curve: MemoryCurve) -> list[dict[str, int]]:
    """Bytes by kind at every launch, for pictures and scripts."""
    return [{str(kind): taken for kind, taken in curve.at(i).items()} for i in range(len(curve.total_bytes))]
