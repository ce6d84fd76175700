"""Results of other commands that a page shows beside the plan: what `--json` of them printed, or a training's log."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from mbc.errors import MbcError
from mbc.report.measured import FIELDS

# By what a result is: fields that it has and no other result does.
_FIELDS = {
    "batches": ("largest", "fastest", "probes"),
    "budgets": ("unlimited", "probes"),
    "step": FIELDS,
    "bench": ("predicted_ms", "mbc", "contenders"),
}
# Of every line of a log (`mbc.train.logs`).
_LINE = {"kind": (str,), "step": (int,), "images_per_s": (int, float), "loss": (int, float, type(None))}
LINES = 2000  # of one kind in a page: more than a chart has pixels for


def read_recorded(text: str, name: str) -> dict[str, Any]:
    """The result in a file called `name`, with `what` it is. Raises MBC321 for anything else."""
    document = _object(text)
    what = next((what for what, fields in _FIELDS.items() if all(field in document for field in fields)), None)
    if what is not None:
        return {"what": what, **document}
    # A training that goes on, or was killed, may have left part of a line.
    whole, _, _ = text.rpartition("\n")
    lines = [_object(line) for line in whole.splitlines()]
    if lines and all(type(line.get(field)) in kinds for line in lines for field, kinds in _LINE.items()):
        return training(lines)
    raise MbcError(
        "MBC321",
        f"'{name}' holds no result that a page can show",
        "give what `mbc fit --json` or `mbc bench --json` printed, what `mbc train --log` wrote, or what --record of"
        " `mbc train` or `mbc bench` did",
    )


def training(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lines of a log as a result. Of more than `LINES` of one kind every n-th is shown, the last one in any case."""
    shown: list[Mapping[str, Any]] = []
    for kind in ("interval", "epoch"):
        found = [line for line in lines if line["kind"] == kind]
        every = -(-len(found) // LINES)
        shown += [line for i, line in enumerate(reversed(found)) if i % every == 0][::-1]
    return {"what": "training", "lines": shown, "left_out": len(lines) - len(shown)}


def _object(text: str) -> Mapping[str, Any]:
    """What JSON says; nothing where it is no object."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return cast(Mapping[str, Any], found) if isinstance(found, dict) else {}
