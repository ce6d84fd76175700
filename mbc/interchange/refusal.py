"""One message with all operations that an import cannot translate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from mbc.errors import MbcError
from mbc.interchange.program import Line

MOST_PLACES = 4
NOTHING_LIKE_IT = "the language has no such operation"
LISTED = "'Importing a PyTorch or ONNX model' in mbc's documentation lists them"
REPLACE = f"compute it with layers that mbc supports: {LISTED}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One operation that cannot be translated.

    Attributes:
        module: The path and class of the module around it.
        operation: The operation's name.
        reason: Why it cannot be translated; its subject is the operation.
        remedy: How to change the model, in the imperative.
        line: The line of the model's code, if PyTorch records it.
    """

    module: str
    operation: str
    reason: str
    remedy: str
    line: Line | None = None


def report_refusals(what: str, refusals: Sequence[Refusal], cause: BaseException | None = None) -> NoReturn:
    """Raise MBC303 with every refusal; equal refusals of several modules are one entry.

    Args:
        what: The subject of the message, such as "the model".
        refusals: The operations that cannot be translated.
        cause: The exception that led to the refusal.

    Raises:
        MbcError: MBC303.
    """
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
    raise MbcError(
        "MBC303",
        f"{what} has {count} that mbc cannot import:\n  {listed}",
        "change the model as stated above, and export it again",
    ) from cause


def printable(text: str, most: int = 200) -> str:
    """Return text of a file for a message: without control characters, and with at most `most` characters."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"
