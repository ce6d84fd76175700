"""Collectives between the GPUs of this machine, and what they and concurrent kernels cost each other: what
`mbc profile --gpu all` measures, and what the planner's model makes of it.

    python benchmarks/collectives.py [--gpus N] [--ctas C ...] [--profile FILE]

Writes `results/collectives.json`: a row a collective and number of thread blocks with the time of every size (of each
of several, and of one alone), bus bandwidths, the model's times at measured sizes and its projection to 4 and 8 GPUs,
and a row a number of thread blocks with slow-downs and the device memory that NCCL takes. Takes under 90 s.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from record import need_gpu, show, start, write

from mbc.hardware.collectives import CollectiveKind, CollectiveModel, CollectiveTime, ConcurrentKernel, Link, bus_share
from mbc.measure.collective_fleet import Measured, measure_collectives
from mbc.measure.collectives import MAX_CTAS
from mbc.measure.fleet import choose_gpus
from mbc.profile.model import collective_subject
from mbc.units import show_size

PROJECTED_RANKS = (4, 8)


def time_row(
    kind: CollectiveKind, max_ctas: int, model: CollectiveModel, times: list[CollectiveTime]
) -> dict[str, Any]:
    """One collective at one number of thread blocks, by size."""
    ranks = times[0].ranks
    sizes = {
        str(t.size_bytes): {
            "time_us": t.time_us,
            "single_us": t.single_us,
            "bus_gb_s": bus_share(kind, ranks) * t.size_bytes / (t.time_us * 1e3),
            "modelled_us": model.time_us(kind, t.size_bytes, ranks, max_ctas),
            "projected_us": {str(n): model.time_us(kind, t.size_bytes, n, max_ctas) for n in PROJECTED_RANKS},
        }
        for t in times
    }
    return {"name": f"{kind}, {max_ctas} thread blocks", "ranks": ranks, "sizes": sizes}


def beside_row(max_ctas: int, ranks: int, model: CollectiveModel, found: Measured) -> dict[str, Any]:
    slowdowns = {kernel: model.slowdown(kernel, ranks, max_ctas) for kernel in ConcurrentKernel}
    memory = {o.subject: o.size_bytes for o in found.overheads}
    return {
        "name": f"beside kernels, {max_ctas} thread blocks",
        "kernel_ratio": {str(k): s.kernel_ratio for k, s in slowdowns.items()},
        "collective_ratio": {str(k): s.collective_ratio for k, s in slowdowns.items()},
        "memory_bytes": memory.get(collective_subject(ranks, max_ctas)),
    }


def rows_of(found: Measured, link: Link) -> list[dict[str, Any]]:
    model = CollectiveModel(link, found.times, found.slowdowns)
    rows: list[dict[str, Any]] = []
    for max_ctas in sorted({t.max_ctas for t in found.times}):
        for kind in CollectiveKind:
            times = [t for t in found.times if (t.kind, t.max_ctas) == (kind, max_ctas)]
            rows.append(time_row(kind, max_ctas, model, times))
        rows.append(beside_row(max_ctas, found.times[0].ranks, model, found))
    return rows


def table(found: Measured) -> list[dict[str, Any]]:
    """All-reduces: microseconds by size and number of thread blocks."""
    rows: dict[int, dict[str, Any]] = {}
    for t in found.times:
        if t.kind is CollectiveKind.ALL_REDUCE:
            row = rows.setdefault(t.size_bytes, {"all-reduce, us": show_size(t.size_bytes)})
            row[f"{t.max_ctas} blocks"] = t.time_us
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="how many (default: all)")
    parser.add_argument("--profile", type=Path, help="write into this profile, too (default: into none)")
    parser.add_argument("--ctas", type=int, nargs="+", default=MAX_CTAS, help="numbers of thread blocks")
    arguments = parser.parse_args()
    need_gpu("collectives need two")
    gpus = choose_gpus("all")[: arguments.gpus]
    began_s = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - began_s:5.1f} s  {text}", flush=True)

    with TemporaryDirectory() as folder:
        found = measure_collectives(
            gpus, arguments.profile or Path(folder) / "profile.sqlite", tell, max_ctas=arguments.ctas
        )
    link = found.times[0].link
    write("collectives", rows_of(found, link), ranks=len(gpus), link=str(link), seconds=time.monotonic() - began_s)
    shown = table(found)
    show(shown, list(shown[0]))


if __name__ == "__main__":
    start(main)
