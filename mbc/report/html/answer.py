"""A question about a plan, with its answer in sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Line:
    """A line below an answer: `before`, the names of `values`, which become links, and `after`."""

    before: str
    values: tuple[str, ...] = ()
    after: str = ""

    @property
    def text(self) -> str:
        """Text without links."""
        return f"{self.before}{', '.join(self.values)}{self.after}"


@dataclass(frozen=True, slots=True)
class Answer:
    """A question with its answer.

    Attributes:
        question: Question.
        answer: Answer in sentences.
        details: Lines below the answer.
        anchor: Part of the page that shows it.
        colour: Colouring of the memory map there, `kind` or `decision`.
    """

    question: str
    answer: str
    details: tuple[Line, ...] = ()
    anchor: str = ""
    colour: str = ""


T = TypeVar("T")


def cut(items: Sequence[T], count: int, most: str, line: Callable[[T], Line], rest: str = "") -> tuple[Line, ...]:
    """Return lines for the first `count` items, and a line that says so where there are more.

    Args:
        items: Items, the most important first.
        count: Number of items to list.
        most: What distinguishes the listed items, for the last line.
        line: Function that formats an item.
        rest: Text of the last line; empty for one about `most`.
    """
    lines = tuple(map(line, items[:count]))
    return lines if len(items) <= count else (*lines, Line(rest or f"{count} of {len(items):,}: those {most}"))
