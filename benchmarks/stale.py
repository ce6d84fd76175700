"""Which results are older than the code: every result file against the digests of the kernels and of the planner now.

python benchmarks/stale.py [--all] [--strict] [--code]     --strict: exit status 1 where one on correctness is
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from record import RESULTS

from mbc.provenance import digests

# What says that results are right; the others say how fast or how large something is.
CORRECTNESS = (
    "gradients_*.json", "steps20.json", "training_loss.json", "digits_*.json", "deterministic.json", "memory_fp32.json",
    "predictions_*.json", "thousand_steps.json", "sanitizer.txt",
)  # fmt: skip
UNKNOWN = "unknown (made before results recorded it)"
Code = Mapping[str, str]


def codes_of(path: Path) -> list[Code | None]:
    """What code made the file and, where it differs, single rows of it; None where that is not recorded."""
    if path.suffix == ".txt":
        found = dict(re.findall(r"^code (\w+) ([0-9a-f]+)$", path.read_text(encoding="utf-8"), re.MULTILINE))
        return [found or None]
    held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    rows: Iterable[Mapping[str, Any]] = held.get("rows", ())
    return [held.get("code"), *(row["code"] for row in rows if "code" in row)]


def older(path: Path, now: Code) -> str:
    """What has changed since the file was made, or nothing."""
    changed: set[str] = set()
    for code in codes_of(path):
        changed |= {UNKNOWN} if code is None else {f"{part} changed" for part in now if code.get(part) != now[part]}
    return ", ".join(sorted(changed))


def on_correctness(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in CORRECTNESS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strict", action="store_true", help="exit status 1 where a result on correctness is older")
    parser.add_argument("--all", action="store_true", help="list the others as well")
    parser.add_argument("--code", action="store_true", help="print what results are held against, and end")
    arguments = parser.parse_args()
    now = digests()
    if arguments.code:
        print("\n".join(f"code {part} {digest}" for part, digest in now.items()))
        return
    paths = sorted(path for path in RESULTS.iterdir() if path.suffix in {".json", ".txt"})
    found = {path.name: older(path, now) for path in paths}
    stale = {name: why for name, why in found.items() if why}
    for name, why in found.items():
        if why or arguments.all:
            print(f"{name:40} {'correctness' if on_correctness(name) else '-':12} {why or 'of today'}")
    missing = [p for p in CORRECTNESS if not any(fnmatch(name, p) for name in found)]
    for pattern in missing:
        print(f"{pattern:40} {'correctness':12} there is none")
    wrong = [name for name in stale if on_correctness(name)] + missing
    print(f"{len(stale)} of {len(found)} results are older than the code, {len(wrong)} on correctness")
    if arguments.strict and wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
