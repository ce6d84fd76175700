"""Results of other commands that a page shows beside the plan: what `--json` of them printed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from mbc.errors import MbcError

# By what a result is: fields that it has and no other result does.
_FIELDS = {
    "batches": ("largest", "fastest", "probes"),
    "budgets": ("unlimited", "probes"),
    "bench": ("predicted_ms", "mbc", "contenders"),
}


def read_recorded(text: str, name: str) -> dict[str, Any]:
    """The result in a file called `name`, with `what` it is. Raises MBC321 for anything else."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    document = cast(Mapping[str, Any], found if isinstance(found, dict) else {})
    what = next((what for what, fields in _FIELDS.items() if all(field in document for field in fields)), None)
    if what is None:
        raise MbcError(
            "MBC321",
            f"'{name}' holds no result that a page can show",
            "give what `mbc fit --json` or `mbc bench --json` printed",
        )
    return {"what": what, **document}
