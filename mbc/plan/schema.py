"""The layout of a plan file, on which its writer (`encode`) and its strict reader (`decode`) agree.

The file is one JSON object. Long lists are tables, `{"columns": [...], "rows": [[...], ...]}`, one row a line. Small
dataclasses are objects with their fields by name. A span is `[source, line, column, length]`, where `source` is an
index into `graph.sources`. An access is `[buffer, first row, row after the last, "r" | "w" | "a"]`. The last field is a
checksum of the content: spaces and line ends may change, but nothing else. A source has the name of its file without
the folder, so that the same text gives the same plan in every folder.

The layout grows without a new schema version. A later section, column or field comes with a default, which is what all
earlier files meant. A reader uses the default where a file lacks the part: defaults of sections and columns are in
DEFAULTS, those of fields of small dataclasses in the dataclass. A writer writes all parts in the order given here, with
four exceptions: `ranks` only if there are several, `peer_limit_bytes` only if a peer lends memory, `settings` only if
there are some, and later fields of operations, optimizers and predictions (`mbc.ir.optional`) only where they are set.
A reader refuses unknown parts by name (MBC114). The schema version rises when a file that is read by these rules would
mean something else; plans of another version are refused (MBC112).
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

# Sections and columns that a file may lack, with their defaults.
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
    """Return the SHA-256 of everything but the checksum itself, as canonical JSON."""
    body = {key: value for key, value in document.items() if key != CHECKSUM}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode("ascii")).hexdigest()
