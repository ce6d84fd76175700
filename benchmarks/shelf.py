"""Plans on disk: one machine or process makes them, another one runs them."""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mbc.plan.file import dump_plan, load_plan
from mbc.plan.model import Plan


def pack(plan: Plan) -> bytes:
    """Return the plan's file, compressed."""
    return gzip.compress(dump_plan(plan).encode(), 6, mtime=0)


@dataclass(frozen=True)
class Shelf:
    """The folder of the plans of all rows. The plans of a row differ in `what`."""

    folder: Path

    def keep(self, row: str, what: str, packed: bytes) -> None:
        """Write a packed plan, whole or not at all."""
        path = self.path(row, what)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_bytes(packed)
        part.replace(path)

    def path(self, row: str, what: str) -> Path:
        """Return the path of a row's plan."""
        return self.folder / f"{re.sub('[^a-z0-9]+', '_', row.lower()).strip('_')}.{what}.json.gz"

    def has(self, row: Mapping[str, Any]) -> bool:
        """Return whether all plans of the row exist (`row["plans"]`: their caps, by `what`)."""
        plans = row.get("plans")
        return plans is not None and all(self.path(row["name"], what).exists() for what in plans)


def unpack(path: Path) -> Plan:
    """Return the plan in a file of a shelf."""
    return load_plan(gzip.decompress(path.read_bytes()).decode(), path.name)
