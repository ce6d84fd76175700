"""A question that one asks of a plan, with its answer in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """One line below an answer: `before`, the names of `values`, which a page makes links of, and `after`."""

    before: str
    values: tuple[str, ...] = ()
    after: str = ""

    @property
    def text(self) -> str:
        return f"{self.before}{', '.join(self.values)}{self.after}"


@dataclass(frozen=True, slots=True)
class Answer:
    """`question` and its `answer`, with `details`: one line each. `anchor`: the part of the page that shows it;
    `colour`: by what the memory is to be coloured there, `kind` or `decision`."""

    question: str
    answer: str
    details: tuple[Line, ...] = ()
    anchor: str = ""
    colour: str = ""


def cut(lines: Sequence[Line], count: int, most: str) -> tuple[Line, ...]:
    """The first `count` of the lines; where there are more, a line says so. `most`: what those have that are listed."""
    if len(lines) <= count:
        return tuple(lines)
    return (*lines[:count], Line(f"{count} of {len(lines):,}: those {most}"))
