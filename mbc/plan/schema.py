"""How a plan file is laid out: what its writer (`encode`) and its strict reader (`decode`) agree on.

The file is one JSON object. Long lists are tables, `{"columns": [...], "rows": [[...], ...]}`, one row a line. Small
dataclasses are objects with their fields by name. A span is `[source, line, column, length]`, `source` an index into
`graph.sources`. An access is `[buffer, first row, row after the last, "r" | "w" | "a"]`. The last field is a checksum
of the content, so that spaces and line ends may change but nothing else. A source has the name of its file without the
folder: the same text gives the same plan wherever it is.

The form grows without a new schema version: a later section, column or field comes with a default, which says what all
files before it meant. A reader takes the default where a file lacks it: those of the section or table in DEFAULTS, of
fields of small dataclasses those of the dataclass. A writer writes all that it knows, in the order given here, but
`ranks` only where there are several, `peer_limit_bytes` where a peer lends memory, `settings` where there are some, and
what operations, optimizers and predictions gained (`mbc.ir.optional`) where it is set. What a reader does not know it
refuses by its name (MBC114). The schema version rises where a file that is read so would mean something else; plans of
another one are refused (MBC112).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mbc.plan.model import Mode

FORMAT = "mbc plan"
CHECKSUM = "checksum"

VALUE_COLUMNS = ("name", "dtype", "shape", "role", "per_sample", "span")
OPERATION_COLUMNS = ("name", "kind", "inputs", "outputs", "attributes", "span")
STATE_COLUMNS = ("value", "initializer")
BUFFER_COLUMNS = ("value", "start", "stop", "layout", "dtype", "size_bytes", "space", "alias", "offset")
LAUNCH_COLUMNS = ("operations", "kernel", "settings", "time_us", "measured", "stream", "accesses")

# What a file may lack, by section and table, and what that means.
DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "plan": {"host_limit_bytes": None, "peer_limit_bytes": 0, "settings": []},
        "graph": {"ranks": None},
        "values": {"span": None},
        "operations": {"span": None},
        "states": {},
        "buffers": {"space": "arena", "alias": None},
        "program": {},
        "launches": {"stream": "compute"},
    }
)

MODE_LETTERS = {Mode.READ: "r", Mode.WRITE: "w", Mode.ACCUMULATE: "a"}


def content_checksum(document: Mapping[str, Any]) -> str:
    """SHA-256 of everything but the checksum itself, in a canonical writing."""
    body = {key: value for key, value in document.items() if key != CHECKSUM}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode("ascii")).hexdigest()
