"""Plain-text tables: aligned columns, as wide as the terminal allows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_GAP = "  "
_JOINT = re.compile(r"(?<=[ /._:+,])")  # where a word of a name begins
DEFAULT_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: Heading.
        right: Whether cells are aligned at their last digit.
        shrinks: Whether cells are cut with `…` when the table is too wide.
        least: Least number of characters of a cell that is cut.
        optional: Rank by which columns are left out of a table that is still too wide, the highest first; 0 never.
    """

    title: str
    right: bool = False
    shrinks: bool = False
    least: int = 8
    optional: int = 0


def render(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Format a table with a rule under the titles.

    Args:
        columns: Columns of the table.
        rows: Cells of each row.
        width: Largest number of characters of a line, as far as columns may shrink; None for no limit.
    """
    kept = list(range(len(columns)))
    longest = [max([len(column.title), *(len(row[i]) for row in rows)]) for i, column in enumerate(columns)]
    if width is not None:
        kept = _affordable(columns, longest, width)
    columns = [columns[i] for i in kept]
    rows = [[row[i] for i in kept] for row in rows]
    widths = [longest[i] for i in kept]
    if width is not None:
        _shrink(widths, columns, width)
    tails = [_tail([row[i] for row in rows], w) for i, w in enumerate(widths)]
    lines = [_line(columns, [column.title for column in columns], widths, tails)]
    lines.append(_GAP.join("-" * w for w in widths))
    lines += [_line(columns, row, widths, tails) for row in rows]
    return "\n".join(lines)


def without_columns(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *titles: str
) -> tuple[tuple[Column, ...], list[tuple[str, ...]]]:
    """Return columns and rows without the columns that have these titles."""
    kept = [i for i, column in enumerate(columns) if column.title not in titles]
    return tuple(columns[i] for i in kept), [tuple(row[i] for i in kept) for row in rows]


def _affordable(columns: Sequence[Column], longest: Sequence[int], width: int) -> list[int]:
    """Return the columns that fit after all have shrunk as far as they may."""
    kept = list(range(len(columns)))

    def least(i: int) -> int:
        return min(longest[i], columns[i].least) if columns[i].shrinks else longest[i]

    while sum(map(least, kept)) + len(_GAP) * (len(kept) - 1) > width:
        droppable = [i for i in kept if columns[i].optional]
        if not droppable:
            break
        kept.remove(max(droppable, key=lambda i: columns[i].optional))
    return kept


def _shrink(widths: list[int], columns: Sequence[Column], width: int) -> None:
    """Take characters from the widest column that may shrink, until the table fits or none may."""
    while sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        can = [i for i, column in enumerate(columns) if column.shrinks and widths[i] > column.least]
        if not can:
            return
        widths[max(can, key=lambda i: widths[i])] -= 1


def _line(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int], tails: Sequence[int]) -> str:
    parts = [
        cut(cell, w, tail).rjust(w) if column.right else cut(cell, w, tail).ljust(w)
        for column, cell, w, tail in zip(columns, cells, widths, tails, strict=True)
    ]
    return _GAP.join(parts).rstrip()


def _tail(cells: Sequence[str], width: int) -> int:
    """Choose how many of the last characters of cut cells stay.

    Most cut cells must still differ; half of the characters stay if that is among the best choices.
    """
    shares = [(width - 1) * sixths // 6 for sixths in (3, 4, 5, 2)]
    return max(shares, key=lambda tail: len({cut(cell, width, tail) for cell in cells}))


def cut(text: str, width: int, tail: int | None = None) -> str:
    """Cut a text to at most `width` characters, of which `tail` are its last ones (None: half).

    The middle is left out because names differ at their ends. Both ends are whole words, unless that would leave less
    than half of an end.
    """
    if len(text) <= width:
        return text
    if width <= 1:
        return "…"[:width]
    if tail is None:
        tail = (width - 1) // 2
    joints = [joint.start() for joint in _JOINT.finditer(text)]
    end = len(text) - tail
    end = min((joint for joint in joints if end <= joint <= len(text) - tail / 2), default=end)
    head = width - 1 - len(text) + end
    head = max((joint for joint in joints if head <= 2 * joint <= 2 * head), default=head)
    return text[:head].rstrip() + "…" + text[end:]
