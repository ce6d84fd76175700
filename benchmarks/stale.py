"""Lists the results that are older than the code that they depend on.

Each result has a digest of each part of the code that made it (`mbc.provenance`). `DEPENDS` says on which parts a
result depends: for example on the families of kernels that its plans may use, and on the planner only if plans were
searched.

python benchmarks/stale.py [--all] [--strict] [--code]     --strict: exit status 1 where a result on correctness is old
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

from mbc.provenance import FAMILIES, digests

# Results that say whether something is right; the others say how fast or how large something is.
CORRECTNESS = (
    "gradients_*.json", "steps20.json", "training_loss.json", "digits_*.json", "deterministic.json", "memory_fp32.json",
    "predictions_*.json", "thousand_steps.json", "sanitizer.txt", "launches.json", "imported*.json",
    "ranks_as_one.json", "checkpoint_mutants.json", "plan_mutants.json", "random_programs.json",
    "onnx_node_tests.json",
    "module_db.json", "planned_networks.json",
)  # fmt: skip
UNKNOWN = "unknown (made before results recorded it)"
Code = Mapping[str, str]

KERNELS = ("kernels", *(f"kernels/{family}" for family in FAMILIES if family != "attention"))  # of the examples
ALL_KERNELS = (*KERNELS, "kernels/attention")
# The first pattern that fits a result's name decides. Values on a CPU come from the operations alone.
DEPENDS: Mapping[str, tuple[str, ...]] = {
    "*_cpu.json": ("operations",),
    "checkpoint_mutants.json": ("runtime",),
    "gradients_*.json": (*KERNELS, "operations"),
    "steps20.json": (*KERNELS, "operations"),
    "training_loss.json": (*KERNELS, "operations"),
    "digits_*.json": (*KERNELS, "operations"),
    "deterministic.json": (*KERNELS, "operations"),
    "ranks_as_one.json": (*KERNELS, "operations"),
    "sanitizer.txt": (*KERNELS, "operations"),
    "launches.json": (*KERNELS, "operations"),
    "imported_cuda.json": (*ALL_KERNELS, "operations", "imports"),
    "from_torch*.json": (*ALL_KERNELS, "operations", "imports", "planner"),
    "imported*.json": ("operations", "imports"),
    "random_programs.json": ("operations", "imports"),
    "onnx_node_tests.json": ("operations", "imports"),
    "module_db.json": ("operations", "imports"),
    "planned_networks.json": ("operations", "planner"),
    "plan_mutants.json": ("operations", "planner"),
    "*": (*KERNELS, "operations", "planner"),
}
IN_16_BITS = ("*_bf16*", "*_fp16*")  # plans of these results have no emulated fp32


def depends(name: str) -> tuple[str, ...]:
    """Return the parts of the code on which a results file depends."""
    parts = next(parts for pattern, parts in DEPENDS.items() if fnmatch(name, pattern))
    emulated = not any(fnmatch(name, pattern) for pattern in IN_16_BITS)
    return tuple(part for part in parts if emulated or part != "kernels/fp32_emulated")


def codes_of(path: Path) -> list[Code | None]:
    """Return the digests of the code of a file, and of rows that differ from it; None if not recorded."""
    if path.suffix == ".txt":
        digest_of = dict(re.findall(r"^code ([\w/]+) ([0-9a-f]+)$", path.read_text(encoding="utf-8"), re.MULTILINE))
        return [digest_of or None]
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    rows: Iterable[Any] = document.get("rows", ())
    return [document.get("code"), *(row["code"] for row in rows if isinstance(row, dict) and "code" in row)]


def older(path: Path, now: Code) -> str:
    """Return the parts of the code that a file depends on and that have changed since the file was made."""
    changed: set[str] = set()
    parts = depends(path.name)
    for code in codes_of(path):
        if code is None or not set(parts) <= set(code):
            changed.add(UNKNOWN)
        else:
            changed |= {f"{part} changed" for part in parts if code[part] != now[part]}
    return ", ".join(sorted(changed))


def on_correctness(name: str) -> bool:
    """Return whether a results file is on correctness."""
    return any(fnmatch(name, pattern) for pattern in CORRECTNESS)


def main() -> None:
    """List the results. With `--strict`, fail if one on correctness is older than its code."""
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
    reasons = {path.name: older(path, now) for path in paths}
    stale = {name: why for name, why in reasons.items() if why}
    for name, why in reasons.items():
        if why or arguments.all:
            print(f"{name:40} {'correctness' if on_correctness(name) else '-':12} {why or 'of today'}")
    missing = [p for p in CORRECTNESS if not any(fnmatch(name, p) for name in reasons)]
    for pattern in missing:
        print(f"{pattern:40} {'correctness':12} there is none")
    wrong = [name for name in stale if on_correctness(name)] + missing
    print(f"{len(stale)} of {len(reasons)} results are older than the code, {len(wrong)} on correctness")
    if arguments.strict and wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
