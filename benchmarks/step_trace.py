"""One step of a plan on the GPU, launch by launch: what each takes and when it runs, measured and predicted.

    python benchmarks/step_trace.py PLAN [--name NAME]

PLAN: a file of build/plans (as `capped.py --plan-only` leaves it), or a built package. Writes
`results/step_trace_<name>.json`, which is what `mbc bench --record` writes of a source: `mbc report --with` and `mbc
trace --with` show it beside the plan.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ahead import build
from modules import random_inputs
from record import need_gpu, show, start, write
from shelf import unpack

from mbc.plan.file import PLAN_FILE, load_plan
from mbc.plan.model import Plan
from mbc.record.recording import record_package
from mbc.report.step_record import record_document, record_text

LEARNING_RATE = 1e-4


def plan_of(place: Path) -> Plan:
    if place.is_file():
        return unpack(place)
    return load_plan((place / PLAN_FILE).read_text(encoding="utf-8"), PLAN_FILE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, metavar="PLAN")
    parser.add_argument("--name", help="of the result (default: that of the plan)")
    arguments = parser.parse_args()
    need_gpu("a record is one of a GPU")
    place: Path = arguments.plan
    name = arguments.name or place.name.removesuffix(".json.gz").replace(".", "_")
    plan = plan_of(place)
    inputs = dict(zip(plan.graph.inputs, random_inputs(plan.graph), strict=True))
    with tempfile.TemporaryDirectory() as made:
        folder = place
        if place.is_file():
            folder = Path(made) / "package"
            if failed := build(place, folder):
                raise SystemExit(failed)
        recorded = record_package(folder, "cuda", inputs, LEARNING_RATE)
    assert recorded is not None
    document = record_document(plan, recorded)
    rows, sums = document.pop("rows"), document["sums"]
    write(f"step_trace_{name}", rows, **document)
    show(sums, list(sums[0]) if sums else [])
    print(record_text({**document, "rows": rows}).splitlines()[-1])


if __name__ == "__main__":
    start(main)
