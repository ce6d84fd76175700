"""How well a larger size tells the times of fewer rows (mbc.profile.scale), beside the estimate without any size.

Each measured size of a profile is scaled from each larger one of up to 64 times the rows; of every provider the
kernel that looks fastest is compared with what was measured. Beside it, for the same sizes, stands the estimate that no
profile informs: the provider's best, and the fastest measured kernel that may take its place, as in calibrate_fit.py.
cuDNN's legacy API has none of its own, and is beside the estimate of cuDNN's engines. Needs no GPU.

    python benchmarks/scaled.py [--profile FILE]

`|log|` is the mean distance of the logarithms: 0.1 is 10 % off, 0.7 a factor of two.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from calibrate import vars_of
from calibrate_fit import fastest_us
from calibrate_sizes import ScaledTime, scaled_times
from record import show, write

from mbc.hardware.spec import DeviceSpec, device_specs
from mbc.kernels import PROVIDERS
from mbc.kernels.base import Request
from mbc.kernels.calibration import Spread
from mbc.kernels.cudnn import CUDNN
from mbc.kernels.cudnn_legacy import CUDNN_LEGACY
from mbc.ops.fused import Fused
from mbc.profile.locate import bundled_path
from mbc.profile.model import Profile, calibrated
from mbc.profile.read import read_profile
from mbc.profile.scale import octave
from mbc.profile.signature import signature

MOST_TIMES = 64


def work(request: Request) -> str:
    """What is counted together: passes of convolutions and of linear layers by precision, groups, the rest."""
    if isinstance(request.attributes, Fused):
        return "groups"
    if request.kind.startswith(("convolution", "linear")):
        return f"{request.kind} {request.precision.value}"
    return "other operations"


def estimated(profile: Profile, device: DeviceSpec, request: Request, provider: str) -> float | None:
    """Measured over estimated time of what looks fastest where no profile helps; None where nothing compares."""
    offering = CUDNN.name if provider == CUDNN_LEGACY.name else provider
    measured = [m for m in profile.measurements[signature(request)] if not m.refused and m.provider == provider]
    pairs = (
        (c.time_us, fastest_us(c, [m for m in measured if (m.name, m.layouts) == (c.name, c.layouts)]))
        for p in PROVIDERS
        if p.name == offering
        for c in p.candidates(request, device)
    )
    known = [(estimate_us, measured_us) for estimate_us, measured_us in pairs if measured_us is not None]
    if not known:
        return None
    estimate_us, measured_us = min(known)
    return measured_us / estimate_us


def row(name: str, scaled: Sequence[float], general: Sequence[float]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "sizes": len(scaled)}
    for label, ratios in (("", scaled), ("estimate ", general)):
        if ratios:
            spread = Spread.of(ratios)
            distance = sum(abs(math.log(ratio)) for ratio in ratios) / len(ratios)
            found |= {f"{label}median": spread.median, f"{label}p10": spread.low, f"{label}p90": spread.high}
            found |= {f"{label}|log|": distance}
    return found


def compare(profile: Profile) -> list[dict[str, Any]]:
    (spec,) = (s for s in device_specs().values() if s.name == profile.identity.gpu)
    device = calibrated(spec, profile)

    @cache
    def general(request: Request, provider: str) -> float | None:
        return estimated(profile, device, request, provider)

    groups: dict[tuple[str, int], list[ScaledTime]] = defaultdict(list)
    for size in scaled_times(profile, device, MOST_TIMES):
        times = octave(size.times)
        groups[size.provider, times].append(size)
        groups[f"{size.provider} {work(size.request)}", times].append(size)
    return [
        row(
            f"{name} x{times}",
            [size.ratio for size in found],
            [ratio for size in found if (ratio := general(size.request, size.provider)) is not None],
        )
        for (name, times), found in sorted(groups.items())
    ]


def main() -> None:
    figures = ("median", "p10", "p90", "|log|")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, default=bundled_path("NVIDIA H200"))
    profile = read_profile(parser.parse_args().profile)
    rows = compare(profile)
    path = write("scaled", rows, profile=vars_of(profile))
    show(rows, ["name", "sizes", *(f"{label}{key}" for label in ("", "estimate ") for key in figures)])
    print(path.name)


if __name__ == "__main__":
    main()
