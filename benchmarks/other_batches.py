"""What a profile is worth at a mini-batch that nobody measured (`mbc.profile.scale.resized`).

Each step is planned from a profile without what was measured at its batch: by the bundled profile alone (`own`), beside
that of a similar GPU, as a user has it (`both`), by the similar GPU's alone, and by the model's estimates alone.
`predicted` is such a plan's step by itself, `taken` by what its launches were measured to take at that batch, both over
`measured_ms`, the step planned with all of it; `priced` is the share of it that was measured, the rest is as predicted.
The similar GPU's profile has its own measurements of that batch. Rows "without 20 %" and "without 50 %" are planned by
the profile without so many of its fused requests, of any batch. Needs no GPU.

    python benchmarks/other_batches.py [--gpu h100] [--similar h200] [--only NAME ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from hashlib import sha256
from statistics import geometric_mean
from typing import Any, TypeVar

from modules import Job, example
from record import attempt, show, write
from similar_gpu import compared_plans

from mbc.hardware.spec import DeviceSpec, find_spec
from mbc.ir.transforms.training_step import differentiate
from mbc.profile.locate import bundled_path
from mbc.profile.model import Profile, scaled_to, unmeasured
from mbc.profile.read import read_profile
from mbc.profile.signature import read_signature, rows_of

Found = TypeVar("Found")
WAYS = ("own", "both", "similar", "model")
COLUMNS = ("name", "measured_ms", "measured", *(f"{way} {what}" for way in WAYS for what in ("predicted", "taken")))
NOT_WITHOUT_GROUPS = ("resnet101 64 bf16", "resnet152 64 bf16")  # as ResNet-50
NETWORKS = ("alexnet", "densenet121", "googlenet", "inception_v4", "mobilenet_v2", "vgg16")


def jobs() -> dict[str, Job]:
    """Steps whose batch was measured: between other batches, below them and above them."""
    resnets = {
        f"resnet{depth} 64": example("resnet", ("depth", depth), ("batch", "64")) for depth in ("50", "101", "152")
    }
    found = resnets | {"vgg16 64": example("vgg16", ("batch", "64"))}
    found |= {f"{name} {batch}": example(name, ("batch", batch)) for batch in ("32", "256") for name in NETWORKS}
    return {f"{name} bf16": job.with_settings(("train.precision", "bf16")) for name, job in found.items()}


def without(profile: Profile, batch: int) -> Profile:
    """What was measured at other numbers of rows."""
    rows = {key: rows_of(read_signature(key)) for key in {*profile.measurements, *profile.extents}}

    def kept(of: Mapping[str, Found]) -> dict[str, Found]:
        return {key: found for key, found in of.items() if rows[key] != batch}

    left = frozenset(key for key in profile.left_to_estimate if rows_of(read_signature(key)) != batch)
    return replace(
        profile,
        measurements=kept(profile.measurements),
        extents=kept(profile.extents),
        earlier={},
        left_to_estimate=left,
    )


def without_groups(profile: Profile, percent: int) -> Profile:
    """What was measured without some of the fused requests, the same ones each time, and none left to estimates."""

    def lost(key: str) -> bool:
        return "+" in read_signature(key).kind and int(sha256(key.encode()).hexdigest(), 16) % 100 < percent

    measurements = {key: found for key, found in profile.measurements.items() if not lost(key)}
    extents = {key: extent for key, extent in profile.extents.items() if not lost(key)}
    return replace(profile, measurements=measurements, extents=extents, earlier={}, left_to_estimate=frozenset())


def step(job: Job, device: DeviceSpec, own: Profile, similar: Profile, percent: int) -> dict[str, Any]:
    lowered = job.lowered()
    graph = differentiate(lowered.network, lowered.optimizer, lowered.precision)
    less = without_groups(own, percent) if percent else without(own, graph.batch)
    profiles = (less, replace(less, similar=similar), unmeasured(similar), None)
    return compared_plans(graph, device, own, dict(zip(WAYS[:2] if percent else WAYS, profiles, strict=False)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--similar", default="h200")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="steps whose name holds one of these")
    arguments = parser.parse_args()
    device, other = find_spec(arguments.gpu), find_spec(arguments.similar)
    own, theirs = (read_profile(bundled_path(spec.name)) for spec in (device, other))
    similar = scaled_to(theirs, other, device)
    rows: list[dict[str, Any]] = []
    for percent in (0, 20, 50):
        for name, job in jobs().items():
            named = f"{name} without {percent} %" if percent else name
            wanted = not arguments.only or any(word in named for word in arguments.only)
            if wanted and not (percent and name in NOT_WITHOUT_GROUPS):
                rows.append(attempt(partial(step, job, device, own, similar, percent), named))
                show(rows[-1:], COLUMNS)
    done = [row for row in rows if "model taken" in row]
    for name, of in (("mean", geometric_mean), ("worst", max)) if done else ():
        rows.append({"name": name, **{column: of([row[column] for row in done]) for column in COLUMNS[3:]}})
    write("other_batches", rows, gpu=device.name, similar=other.name)
    show(rows, COLUMNS)


if __name__ == "__main__":
    main()
