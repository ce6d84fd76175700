"""Time each convolution of nnU-Net's step: mbc's own kernels beside the best of libraries, and the limit of the GPU.

    python benchmarks/volume_convolutions.py PROFILE [--precision fp16] [--set NAME=VALUE ...] [--for SECONDS]
    python benchmarks/volume_convolutions.py --count

The requests are the convolutions of the plain network's step, all passes, in the order of their arithmetic. Candidates
are checked and timed as `mbc profile` does, which leaves out kernels of mbc whose estimate is hopeless. Measurements go
to the profile, with which another call continues. `--count` lists the requests and needs no GPU.

Writes `results/volume_convolutions.json` with a row for each request: its number in a step, the fastest kernel of mbc's
own and the fastest of libraries in microseconds, TFLOP/s of the faster one, and `share`, the limit over its time. The
limit is the longer of its arithmetic at the GPU's peak and its bytes, each operand once, at the copy bandwidth. The row
`step` has the sums over a step, in which the faster kernel of each request counts (`best_us`).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modules import Job, example
from record import Results, need_gpu, show, start

from mbc.hardware.spec import DeviceSpec
from mbc.hardware.target import find_device
from mbc.kernels.base import Request
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.convolution_shapes import PASSES, Shapes, shapes_of
from mbc.kernels.cuda import OWN
from mbc.kernels.cuda.base import moved_us
from mbc.optimize.candidates.table import request_of
from mbc.passes.training_step import differentiate
from mbc.plan.model import Rows
from mbc.profile.model import Measurement
from mbc.profile.signature import signature

COLUMNS = ("name", "count", "own", "own_us", "library", "library_us", "limit_us", "tflops", "share")


def convolutions(job: Job) -> Counter[Request]:
    """Return the convolutions of a training step in all passes, with their number; the largest come first."""
    lowered = job.lowered()
    graph = differentiate(lowered.network, lowered.optimizer, lowered.precision)
    rows = Rows(0, graph.batch)
    counts = Counter(request_of(graph, operation, rows) for operation in graph.train if operation.kind in PASSES)
    return Counter(dict(sorted(counts.items(), key=lambda pair: -_shapes(pair[0]).operations)))


def _shapes(request: Request) -> Shapes:
    shapes = shapes_of(request)
    assert shapes is not None
    return shapes


def name_of(request: Request) -> str:
    """Return the name of a row: the pass, channels, filters, output size, kernel and stride."""
    shapes = _shapes(request)
    kernel, stride = ("x".join(map(str, axes)) for axes in (shapes.attributes.kernel, shapes.attributes.stride))
    filters, channels = shapes.filter.shape[:2]
    size = "x".join(map(str, shapes.result.shape[2:]))
    return f"{request.kind} {channels} to {filters} at {size} kernel {kernel} stride {stride}"


def row_of(request: Request, count: int, measured: Sequence[Measurement], device: DeviceSpec) -> dict[str, Any]:
    """Return the row of a request, without times where nothing was measured."""
    operations = _shapes(request).operations
    limit_us = max(operations / peak_tflops(device, request.precision) / 1e6, moved_us(request, device))
    row: dict[str, Any] = {"name": name_of(request), "count": count, "limit_us": limit_us}
    for side, is_own in (("own", True), ("library", False)):
        of_side = [m for m in measured if not m.refused and not m.dominated and (m.provider == OWN.name) is is_own]
        if of_side:
            fastest = min(of_side, key=lambda m: m.time_us)
            row |= {side: fastest.name, f"{side}_us": fastest.time_us}
    times_us = [row[key] for key in ("own_us", "library_us") if key in row]
    if times_us:
        best_us = min(times_us)
        row |= {"best_us": best_us, "tflops": operations / best_us / 1e6, "share": limit_us / best_us}
    return row


def step_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums over a step; a sum is missing if one of its times is."""
    row: dict[str, Any] = {"name": "step", "count": sum(row["count"] for row in rows)}
    for key in ("limit_us", "library_us", "best_us"):
        if all(key in row for row in rows):
            row[key] = sum(row[key] * row["count"] for row in rows)
    return row | ({"share": row["limit_us"] / row["best_us"]} if "best_us" in row else {})


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path, nargs="?")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="patch=(64, 64, 64), for example")
    parser.add_argument("--for", dest="seconds", type=float, default=150.0, help="begin no measurement later")
    parser.add_argument("--count", action="store_true", help="only list the requests; needs no GPU")
    arguments = parser.parse_args()
    settings = [(pair.split("=", 1)[0], pair.split("=", 1)[1]) for pair in arguments.set]
    job = example("nnunet", ("train.precision", arguments.precision), *settings)
    counts = convolutions(job)
    if arguments.count:
        device = find_device(job.gpu)
        show([row_of(request, count, (), device) for request, count in counts.items()], ("name", "count", "limit_us"))
        return
    if arguments.profile is None:
        parser.error("name the profile into which the measurements go, or use --count")
    need_gpu("--count lists the requests without one")
    from mbc.measure.gpu import Gpu
    from mbc.measure.measure import measure
    from mbc.measure.need import Need
    from mbc.profile.read_profile import read_profile

    with Gpu() as gpu:
        needs = [Need((request,), float(_shapes(request).operations)) for request in counts]
        summary = measure(gpu, needs, arguments.profile, arguments.seconds, link=False)
    for failure in summary.failures:
        print(failure)
    measurements, device = read_profile(arguments.profile).measurements, find_device("auto")
    kept = Results("volume_convolutions", {"settings": [f"precision={arguments.precision}", *arguments.set]}, {})
    rows = [
        row_of(request, count, measurements.get(signature(request), ()), device) for request, count in counts.items()
    ]
    for row in (step_of(rows), *rows):
        kept.put(row)
    show(list(kept.rows.values()), COLUMNS)


if __name__ == "__main__":
    start(main)
