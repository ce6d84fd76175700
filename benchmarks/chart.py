"""Line charts as SVG text, which are readable on light and dark pages. Equal figures give equal bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 64, 216, 48, 56  # around the plot; the legend is on the right
COLOURS = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#e11d48", "#eab308", "#06b6d4", "#84868b")
MOST_TICKS = 7
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-size: 15px; font-weight: 600 }
  .grid { stroke: #d0d7de; stroke-width: 1 }
  .axis { stroke: #57606a; stroke-width: 1 }
  .line { fill: none; stroke-width: 2.2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .grid { stroke: #30363d } .axis { stroke: #8b949e }
  }
"""


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        label: Name of the line.
        points: Points (x, y), x ascending.
        dashed: Whether the line is dashed.
        dots: Single figures whose means are the points; they are drawn behind the line.
    """

    label: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    dots: tuple[tuple[float, float], ...] = ()


def chart(
    title: str, x_label: str, y_label: str, lines: Sequence[Line], y_log: bool = False, y_zero: bool = False
) -> str:
    """Return an SVG document whose x axis is logarithmic, with a tick at every x of a line.

    With `y_zero` the y axis begins at 0, so that heights are proportional to the values.
    """
    marks = [point for line in lines for point in (*line.points, *line.dots)]
    if not marks:
        raise ValueError(f"nothing to draw: {title}")
    xs = sorted({x for x, _ in marks})
    named = sorted({x for line in lines for x, _ in line.points})
    ticks = _log_ticks([y for _, y in marks]) if y_log else _ticks([y for _, y in marks] + [0.0] * y_zero)
    frame = _Frame(xs[0], xs[-1], ticks[0], ticks[-1], y_log)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="24">{escape(title)}</text>',
    ]
    for tick in ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    bottom = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}"/>')
    for tick in named:
        parts.append(f'<text x="{frame.x(tick):.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>')
    centre = (TOP + bottom) / 2
    parts.append(f'<text transform="translate(18 {centre}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>')
    for number, line in enumerate(lines):
        parts += _line(line, COLOURS[number % len(COLOURS)], frame, number)
    return "\n".join((*parts, "</svg>")) + "\n"


@dataclass(frozen=True)
class _Frame:
    """The mapping from figures to pixels."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    y_log: bool

    def x(self, value: float) -> float:
        span = math.log(self.x_high / self.x_low) or 1.0
        return LEFT + 14 + (WIDTH - LEFT - RIGHT - 28) * math.log(value / self.x_low) / span

    def y(self, value: float) -> float:
        if self.y_log:
            share = math.log(value / self.y_low) / math.log(self.y_high / self.y_low)
        else:
            share = (value - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def _line(line: Line, colour: str, frame: _Frame, number: int) -> list[str]:
    parts = [
        f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.4" fill="{colour}" fill-opacity="0.35"/>'
        for x, y in line.dots
    ]
    dash = ' stroke-dasharray="6 4"' if line.dashed else ""
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in line.points)
    parts.append(f'<polyline class="line" stroke="{colour}"{dash} points="{path}"/>')
    for x, y in line.points:
        parts.append(
            f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="4" fill="{colour}">'
            f"<title>{escape(line.label)}, {x:g}: {y:.2f}</title></circle>"
        )
    left, y = WIDTH - RIGHT + 16, TOP + 12 + 22 * number
    parts.append(f'<line class="line" stroke="{colour}"{dash} x1="{left}" y1="{y}" x2="{left + 26}" y2="{y}"/>')
    parts.append(f'<text x="{left + 34}" y="{y + 4}">{escape(line.label)}</text>')
    return parts


def _ticks(values: Sequence[float]) -> list[float]:
    """Return at least two round numbers around `values`."""
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / MOST_TICKS))
    step = next(power * k for k in (1, 2, 2.5, 5, 10, 20) if span / (power * k) <= MOST_TICKS - 2)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * k, 10) for k in range(first, max(last, first + 1) + 1)]


def _log_ticks(values: Sequence[float]) -> list[float]:
    """Return the powers of two around `values`."""
    first, last = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    return [2.0**k for k in range(first, max(last, first + 1) + 1)]
