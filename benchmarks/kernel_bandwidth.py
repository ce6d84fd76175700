"""mbc's own kernels in a network's training step beside the bandwidth of copying, those that lose most first.

Bytes are counted as `mbc show --roofline` does: every operand once, from shapes, workspace not at all. Times are those
of a profile. The bandwidth of copying is the fastest copy that the same profile knows: a conversion that changes
nothing, of several times what the cache holds. `cached` marks operations whose bytes all fit the cache: in a step some
of them are there still, and a launch takes about as long as reading them.

    python benchmarks/kernel_bandwidth.py [--gpu h200] [--profile FILE] [--network resnet] [--only KIND ...]
                                          [--set depth=50 batch=256 train.precision=bf16]
                                          [--measure SECONDS] [--of FILE] [--products]

`--products`: convolutions and GEMMs with what is fused into them instead, cuDNN's too. They are held against the longer
of their bytes and their products at the GPU's peak.
`--measure` takes the times from this machine's GPU, and those of the profile stand beside them. `--of` takes the
launches from a result of this script instead of a plan: kernels that were rewritten since are no part of a plan before
the profile knows them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modules import Job, example
from record import need_gpu, show, start, write

from mbc import aliases
from mbc.analysis.roofline import Ceilings, ceilings_of, limits
from mbc.hardware.spec import DeviceSpec, find_spec
from mbc.ir.types import Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda import OWN
from mbc.measure.need import Need
from mbc.ops.base import NoAttributes
from mbc.optimize.candidates.table import request_of
from mbc.plan.group import operation_of
from mbc.plan.model import Kernel, Plan, Rows
from mbc.profile.locate import find_profile
from mbc.profile.model import Profile
from mbc.profile.read import read_profile
from mbc.profile.signature import read_signature, signature

SETTINGS = ("depth=50", "batch=256", "train.precision=bf16")
STREAMED_L2S = 8  # caches that a copy reads and writes, to say something of memory
WANTED = 0.85  # of the bandwidth of copying


@dataclass(frozen=True)
class Place:
    """One request that a step runs `count` times by the same kernel. `moved_bytes` and `time_us` are of one of them."""

    request: Request
    kernel: str
    layouts: tuple[Layout, ...]
    moved_bytes: int
    time_us: float
    count: int = 1
    flops: int = 0


def places(plan: Plan, products: bool = False) -> list[Place]:
    """The launches of mbc's own kernels in the training step that compute no products; or of all that do."""
    operations = {o.name: o for o in plan.graph.train}
    found: dict[tuple[str, str, tuple[Layout, ...]], Place] = {}
    for one in limits(plan, plan.train, ceilings_of(plan)):
        launch = plan.train.launches[one.summary.first_launch]
        work = launch.work
        if not isinstance(work, Kernel) or not launch.operations or bool(one.flops) is not products:
            continue
        if not products and work.provider != OWN.name:
            continue
        if not one.moved_bytes or len(one.summary.micro_batches) > 1:
            continue
        request = request_of(plan.graph, operation_of(launch, operations, plan.buffers), Rows(0, plan.graph.batch))
        buffers = (plan.buffers[access.buffer] for access in launch.accesses)
        layouts = tuple(buffer.layout for buffer in buffers if buffer.value is not None)
        key = signature(request), work.name, layouts
        known = found.get(key, Place(request, work.name, layouts, one.moved_bytes, one.summary.time_us, 0, one.flops))
        found[key] = replace(known, count=known.count + 1)
    return list(found.values())


def places_of(path: Path) -> list[Place]:
    """Those of an earlier result, whose names may be others."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [
        Place(
            read_signature(aliases.signature(row["request"])),
            aliases.kernel(row["kernel"]),
            tuple(map(Layout, row["layouts"])),
            row["bytes"],
            row["time_us"],
            row["count"],
            row.get("flops", 0),
        )
        for row in rows
    ]


def copy_gb_s(profile: Profile, device: DeviceSpec) -> float:
    """Bytes read and written by the fastest copy of the profile, of those that no cache helps."""
    rates = [
        2 * request.inputs[0].size_bytes / measured.time_us / 1e3
        for key, rows in profile.measurements.items()
        if (request := read_signature(key)).kind == "convert"
        and request.inputs == request.outputs
        and request.inputs[0].size_bytes >= STREAMED_L2S * device.l2_bytes
        for measured in rows
        if not measured.refused and len(set(measured.layouts)) == 1 and measured.time_us > 0
    ]
    if not rates:
        raise SystemExit("the profile knows no copy that is larger than the cache: measure one with mbc profile")
    return max(rates)


def largest(request: Request) -> TensorType:
    return max((*request.inputs, *request.outputs), key=lambda t: t.size_bytes)


def row_of(place: Place, ceilings: Ceilings, copy_bytes_per_us: float, device: DeviceSpec) -> dict[str, Any]:
    limit_us = max(place.moved_bytes / copy_bytes_per_us, place.flops / ceilings.flops_per_us)
    shape = largest(place.request)
    return {
        "name": f"{place.request.kind} {shape}",
        "kernel": place.kernel,
        "request": signature(place.request),
        "layouts": [str(layout) for layout in place.layouts],
        "count": place.count,
        "bytes": place.moved_bytes,
        "mib": place.moved_bytes / 2**20,
        "time_us": place.time_us,
        "of_copy": place.moved_bytes / copy_bytes_per_us / place.time_us,
        "of_ceiling": place.moved_bytes / ceilings.bytes_per_us / place.time_us,
        "flops": place.flops,
        "of_limit": limit_us / place.time_us,
        "lost_us": place.count * (place.time_us - limit_us),
        "cached": place.moved_bytes <= device.l2_bytes,
    }


def by_kernel(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """All places of a kernel together, with and without those that the cache holds."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["kernel"], []).append(row)
    found = [
        {
            "kernel": kernel,
            "places": sum(r["count"] for r in group),
            "ms": sum(r["count"] * r["time_us"] for r in group) / 1e3,
            "of_copy": _share(group),
            "of_copy_uncached": _share([r for r in group if not r["cached"]]),
            "lost_us": sum(r["lost_us"] for r in group),
        }
        for kernel, group in groups.items()
    ]
    return sorted(found, key=lambda r: -r["lost_us"])


def _share(group: list[dict[str, Any]]) -> float | None:
    time_us = sum(r["count"] * r["time_us"] for r in group)
    return sum(r["count"] * r["time_us"] * r["of_copy"] for r in group) / time_us if time_us else None


def measured_here(found: list[Place], device: DeviceSpec, seconds: float) -> Profile:
    """What this machine's GPU takes for these requests and for a large copy: measured anew, in a file that goes."""
    from mbc.measure.gpu import Gpu
    from mbc.measure.measure import measure

    precision = found[0].request.precision
    copied = TensorType((1024, 64, STREAMED_L2S * device.l2_bytes // (2 * 1024 * 64), 1), precision.working)
    wanted = [Need((Request("convert", NoAttributes(), (copied,), (copied,), precision),), 1e12)]
    wanted += [Need((place.request,), place.count * place.time_us) for place in found]
    with tempfile.TemporaryDirectory() as folder, Gpu() as gpu:
        path = Path(folder) / "here.sqlite"
        summary = measure(gpu, wanted, path, seconds, link=False)
        for failure in summary.failures:
            print(failure)
        if summary.left:
            print(f"{summary.left} of {len(wanted)} were not measured: --measure gives it longer")
        return read_profile(path)


def as_measured(place: Place, profile: Profile) -> dict[str, Any] | None:
    """Times of all kernels of the place's layouts, and which is the fastest. Those to which the layout makes no
    difference are measured in one."""
    known = profile.measurements.get(signature(place.request), ())
    rows = [m for m in known if m.layouts == place.layouts] or known
    # The fastest engine of cuDNN's, which share a name.
    times = {m.name: m.time_us for m in sorted(rows, key=lambda m: -m.time_us) if not m.refused}
    if not times:
        return None
    best = min(times, key=lambda name: times[name])
    refused = {m.name: m.refused for m in rows if m.refused}
    return {"kernel": best, "time_us": times[best], "times_us": times} | ({"refused": refused} if refused else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--profile", help="default: what mbc finds for the GPU")
    parser.add_argument("--network", default="resnet", help="an example")
    parser.add_argument("--set", nargs="*", default=SETTINGS, metavar="NAME=VALUE")
    parser.add_argument("--only", nargs="*", default=[], metavar="KERNEL")
    parser.add_argument("--measure", type=float, metavar="SECONDS")
    parser.add_argument("--of", type=Path, metavar="FILE")
    parser.add_argument("--products", action="store_true")
    arguments = parser.parse_args()
    if arguments.measure:
        need_gpu("leave --measure out to read a profile")
    device = find_spec(arguments.gpu)
    settings = ((pair.split("=", 1)[0], pair.split("=", 1)[1]) for pair in arguments.set)
    job: Job = replace(example(arguments.network, *settings), gpu=arguments.gpu)
    profile = find_profile(device, arguments.profile)
    if profile is None:
        raise SystemExit(f"there is no profile of {device.name}: --profile names one")
    if arguments.of:
        found = [p for p in places_of(arguments.of) if bool(p.flops) is arguments.products]
    else:
        found = places(job.with_options(profile=arguments.profile).plan(), arguments.products)
    found = [p for p in found if not arguments.only or p.kernel in arguments.only]
    ceilings, copy = Ceilings.of(device, found[0].request.precision), copy_gb_s(profile, device)
    rows = [row_of(place, ceilings, copy * 1e3, device) for place in found]
    if arguments.measure:
        here = measured_here(found, device, arguments.measure)
        copy = copy_gb_s(here, device)
        rows = [
            {**row_of(replace(place, kernel=new["kernel"], time_us=new["time_us"]), ceilings, copy * 1e3, device),
             "times_us": new["times_us"], "before_us": row["time_us"]}
            for place, row in zip(found, rows, strict=True)
            if (new := as_measured(place, here))
        ]  # fmt: skip
    rows.sort(key=lambda r: -r["lost_us"])
    kernels = by_kernel(rows)
    path = write(
        "kernel_products" if arguments.products else "kernel_bandwidth", rows,
        network=job.name, settings=list(arguments.set),
        profile=Path(profile.source).name, measured_on=profile.identity.gpu,
        copy_gb_s=copy, ceiling_gb_s=ceilings.bytes_per_us / 1e3, kernels=kernels,
    )  # fmt: skip
    before = ["before_us"] if arguments.measure else []
    share = "of_limit" if arguments.products else "of_copy"
    show(rows, ["name", "kernel", "count", "mib", *before, "time_us", share, "lost_us", "cached"])
    show(kernels, ["kernel", "places", "ms", "of_copy", "of_copy_uncached", "lost_us"])
    large = [r for r in rows if not r["cached"]]
    slow = sum(r[share] < WANTED for r in large)
    lost_us = sum(max(0.0, r["lost_us"]) for r in rows)
    print(
        f"{copy:,.0f} GB/s of copying; {sum(r['count'] for r in rows)} launches lose {lost_us / 1e3:.2f} ms; of"
        f" {len(large)} kinds beyond the cache {slow} are under {WANTED:.0%}"
    )
    print(path.name)


if __name__ == "__main__":
    start(main)
