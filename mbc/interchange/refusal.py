"""All that an import cannot take, in one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mbc.errors import MbcError
from mbc.interchange.program import Line

MOST_PLACES = 4
NOTHING_LIKE_IT = "there is nothing like it in the language yet"
REPLACE = "compute it by layers that docs/import.md lists"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One thing that cannot be taken: the path and class of the module it is in, the operation, why, and what would do
    instead. `line`: of the model's code, where torch tells it."""

    module: str
    operation: str
    reason: str
    remedy: str
    line: Line | None = None


def refused(what: str, refusals: Sequence[Refusal]) -> MbcError:
    """MBC303 with every refusal; equal ones of several modules are one entry."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for refusal in refusals:
        line = refusal.line
        place = "" if line is None else f"{line.file}:{line.number}: {line.code}"
        places = groups.setdefault((refusal.operation, refusal.reason, refusal.remedy, place), [])
        if refusal.module not in places:
            places.append(refusal.module)
    lines: list[str] = []
    for (operation, reason, remedy, place), modules in groups.items():
        more = f" and {len(modules) - MOST_PLACES} more" if len(modules) > MOST_PLACES else ""
        lines.append(f"{', '.join(modules[:MOST_PLACES])}{more}: {operation}: {reason}")
        lines += [f"    at {place}"] if place else []
        lines.append(f"    instead: {remedy}")
    listed = "\n  ".join(lines)
    count = f"{len(groups)} thing{'s' if len(groups) != 1 else ''}"
    return MbcError(
        "MBC303",
        f"{what} has {count} that mbc cannot take:\n  {listed}",
        "change the model as said above, and export it again (docs/import.md lists what can be taken)",
    )
