"""Console blocks of pages: their commands, and a comparison of the text under a command with its output.

A page may replace lines by `...`. Figures that depend on the machine (`MACHINE`) are not compared.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LEFT_OUT = "..."
# Seconds and speed; what training comes to, and how far sums are off, whose last digits are those of a BLAS. The rest
# is the same on every machine.
MACHINE = re.compile(
    r"(?<=planned in )[\d.]+(?= s)|, (?:built|written) in [\d.]+ s|[\d,.]+(?= images/s)"
    r"|(?<=loss )[\d.]+|(?<=accuracy )[\d.]+(?=%)|\d\.\de-\d\d"
)


@dataclass(frozen=True)
class Shown:
    """One command of a page and the lines of output under it."""

    command: str
    output: tuple[str, ...]


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a page in one language."""
    contents: list[str] = []
    inside: str | None = None
    for line in text.splitlines(keepends=True):
        if line.startswith("```"):
            if inside is None and line[3:].strip() == language:
                contents.append("")
            inside = line[3:].strip() if inside is None else None
        elif inside == language:
            contents[-1] += line
    return contents


def shown(text: str) -> list[Shown]:
    """Return every command of a page, in order, with the output under it."""
    shown_commands: list[Shown] = []
    for block in blocks(text, "console"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                shown_commands.append(Shown(line[2:].split("  #")[0].strip(), ()))
            elif shown_commands:
                shown_commands[-1] = Shown(shown_commands[-1].command, (*shown_commands[-1].output, line))
    return shown_commands


def steady(line: str) -> str:
    """Return the line with `#` in the place of figures that depend on the machine."""
    return MACHINE.sub(lambda match: "" if match[0].startswith(", ") else "#", line.rstrip())


def first_difference(wanted: Sequence[str], printed: Sequence[str]) -> str:
    """Return the first line of a page that the command does not print at its place, or an empty text."""
    lines = [steady(line) for line in printed]
    at, floating = 0, False
    for line in map(steady, wanted):
        if line == LEFT_OUT:
            floating = True
            continue
        places = range(at, len(lines)) if floating else range(at, min(at + 1, len(lines)))
        place = next((i for i in places if lines[i] == line), None)
        if place is None:
            return line
        at, floating = place + 1, False
    return "" if floating or at == len(lines) else f"(the command goes on: {lines[at]})"


def brought_up_to_date(wanted: Sequence[str], printed: Sequence[str]) -> list[str]:
    """Return the page's lines, each replaced by the most similar printed line.

    Lines that the page leaves out stay out.
    """
    new: list[str] = []
    at = 0
    for line in wanted:
        if line == LEFT_OUT:
            new.append(line)
            continue
        rest = [steady(p) for p in printed[at:]]
        if not rest:
            break
        (best,) = difflib.get_close_matches(steady(line), rest, n=1, cutoff=0.0)
        place = at + rest.index(best)
        new += [LEFT_OUT] if place > at and (not new or new[-1] != LEFT_OUT) else []
        new.append(printed[place].rstrip())
        at = place + 1
    return new if at >= len(printed) or new[-1:] == [LEFT_OUT] else [*new, LEFT_OUT]


def with_output(page: Path, command: str, old: Sequence[str], new: Sequence[str]) -> None:
    """Replace `old` by `new` under `command`, whose last line is just before it."""
    text, before, after = page.read_text(encoding="utf-8"), "\n".join(old), "\n".join(new)
    last = command.split("  ")[-1].strip()
    place = text.index(before, text.index(last))
    page.write_text(text[:place] + after + text[place + len(before) :], encoding="utf-8")
