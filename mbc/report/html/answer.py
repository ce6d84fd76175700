"""A question that one asks of a plan, with its answer in sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar


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


T = TypeVar("T")


def cut(found: Sequence[T], count: int, most: str, line: Callable[[T], Line], rest: str = "") -> tuple[Line, ...]:
    """The lines of the first `count` of what was found; where there are more, a line says so. `most`: what those have
    that are listed; `rest`: what the line says instead."""
    lines = tuple(map(line, found[:count]))
    return lines if len(found) <= count else (*lines, Line(rest or f"{count} of {len(found):,}: those {most}"))
