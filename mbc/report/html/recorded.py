"""Results of other commands that a page shows beside the plan: output of `--json`, or the log of a training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from mbc.errors import MbcError
from mbc.report.measured import FIELDS

# Fields by which each type of result is recognised.
_FIELDS = {
    "batches": ("largest", "fastest", "probes"),
    "budgets": ("unlimited", "probes"),
    "step": FIELDS,
    "bench": ("predicted_ms", "mbc", "contenders"),
}
# Fields of every line of a log (`mbc.train.logs`).
_LINE = {"kind": (str,), "step": (int,), "images_per_s": (int, float), "loss": (int, float, type(None))}
LINES = 2000  # of one kind in a page: more than a chart has pixels for


def read_recorded(text: str, name: str) -> dict[str, Any]:
    """Return the result in a file called `name`, with its type as `what`.

    Raises:
        MbcError: MBC321, the text is no such result.
    """
    document = _object(text)
    what = next((what for what, fields in _FIELDS.items() if all(field in document for field in fields)), None)
    if what is not None:
        return {"what": what, **document}
    # A training that still runs, or was killed, may leave part of a line.
    whole, _, _ = text.rpartition("\n")
    lines = [_object(line) for line in whole.splitlines()]
    if lines and all(type(line.get(field)) in kinds for line in lines for field, kinds in _LINE.items()):
        return training(lines)
    raise MbcError(
        "MBC321",
        f"'{name}' holds no result that a page can show",
        "give the output of `mbc fit --json` or `mbc bench --json`, or a file of `mbc train --log` or of --record",
    )


def training(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the lines of a log as a result; above `LINES` lines of one kind, show every n-th and the last one."""
    shown: list[Mapping[str, Any]] = []
    for kind in ("interval", "epoch"):
        of_kind = [line for line in lines if line["kind"] == kind]
        every = -(-len(of_kind) // LINES)
        shown += [line for i, line in enumerate(reversed(of_kind)) if i % every == 0][::-1]
    return {"what": "training", "lines": shown, "left_out": len(lines) - len(shown)}


def _object(text: str) -> Mapping[str, Any]:
    """Return an object of JSON; an empty one if the text is no object."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return cast(Mapping[str, Any], value) if isinstance(value, dict) else {}
