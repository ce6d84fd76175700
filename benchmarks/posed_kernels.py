"""Measure mbc's own kernels by mma.sync on a GPU that poses as an older one, and the rate of mma.sync itself.

Estimates for GPUs without a profile are fitted to these measurements (docs/estimates.md). The requests are those that
plans of four networks in bf16 can use, the longest first; the eight other networks of `unprofiled_steps.py` then test
the fit. Candidates are checked and timed as `mbc profile` does, but only kernels of mbc's own that declare products by
mma.sync. The rate is that of `mma_peak.cu`; it goes to the profile, too.

    python benchmarks/posed_kernels.py PROFILE [--pose sm_80] [--for SECONDS]
    python benchmarks/calibrate.py --missing --write --profile PROFILE
    python benchmarks/posed_kernels.py --count

Another call with the same profile goes on. `--count` lists the networks and their requests, and needs no GPU. Planning
must not use such a profile: it lacks the kernels of libraries.

Writes `results/posed_kernels.json` with a row for each kernel: `peak_share`, the largest share of the measured rate of
mma.sync, `memory_share`, the largest share of the copy bandwidth, `limit_share`, the median over its requests of
the longer of both limits over its time, and `refused`, the number of requests whose results were wrong or that failed.
A kernel passed if a request reached 60 % of either limit, and none was refused.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from calibrate import device_of
from calibrate_fit import samples
from modules import Job, example, median
from record import need_gpu, show, start, write

from mbc.codegen.toolchain import find_toolchain
from mbc.hardware.spec import DeviceSpec
from mbc.hardware.target import find_device
from mbc.kernels.base import Candidate, Request
from mbc.kernels.cuda import KERNELS, OWN
from mbc.measure.need import Need
from mbc.options import Policy
from mbc.profile.model import Profile
from mbc.profile.read_profile import read_profile
from mbc.profile.writer import ProfileWriter

HALF = ("train.precision", "bf16")
NETWORKS = (
    ("resnet", ("depth", "50"), ("batch", "128")),
    ("densenet121", ("batch", "128")),
    ("mobilenet_v2", ("batch", "128")),
    ("vgg16", ("batch", "64")),
)
PEAK_SOURCE = Path(__file__).resolve().with_name("mma_peak.cu")
ASKED_SHARE = 0.6  # of the measured rate of mma.sync, or of the bandwidth where that is the limit
COLUMNS = ("name", "requests", "refused", "peak_share", "memory_share", "limit_share", "passed")


def jobs(pose: str, gpu: str = "h200") -> list[Job]:
    """Return the networks whose kernels are measured, for a GPU that poses."""
    named = (example(name, *settings, HALF) for name, *settings in NETWORKS)
    return [Job(job.name, job.source, job.settings, job.network, f"{gpu}@{pose}") for job in named]


def of_family(request: Request, device: DeviceSpec) -> list[Candidate]:
    """Return the candidates of a request that declare their products by mma.sync."""
    return [candidate for candidate, effort in OWN.estimated(request, device) if effort.family]


def needs_of(job: Job, device: DeviceSpec) -> list[Need]:
    """Return the undivided requests of a network that kernels by mma.sync can run."""
    return [need for need in job.needs(Policy.UNDIVIDED) if of_family(need.undivided, device)]


def peak_command(nvcc: Path, pose: str, library: Path) -> list[str]:
    """Return the command that compiles the probe of the rate of mma.sync, as PTX of the pose."""
    target = pose.replace("sm", "compute")
    options = ("-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", "-gencode", f"arch={target},code={target}")
    return [str(nvcc), *options, "-o", str(library), str(PEAK_SOURCE)]


def measured_peak(pose: str) -> float:
    """Return the rate of mma.sync in TFLOP/s on the GPU of this process."""
    toolchain = find_toolchain()
    if toolchain.nvcc is None:
        raise SystemExit("the rate of mma.sync cannot be measured without nvcc: run `mbc doctor`")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libpeak.so"
        subprocess.run(peak_command(toolchain.nvcc, pose, library), check=True)
        probe = ctypes.CDLL(str(library)).mbc_mma_peak
        probe.restype = ctypes.c_double
        tflops = float(probe())
    if tflops <= 0:
        raise SystemExit(f"the probe of mma.sync failed with CUDA error {-tflops:.0f}")
    return tflops


def measure(pose: str, path: Path, seconds: float) -> Sequence[str]:
    """Measure the rate of mma.sync and the kernels into a profile, and return the failures."""
    from mbc.measure.gpu import Gpu
    from mbc.measure.kernel_library import KernelLibrary
    from mbc.measure.measure import measure_on
    from mbc.measure.offers import Offer, Offered
    from mbc.measure.workbench import Bench

    class MmaBench(Bench):
        """The workbench, which offers kernels by mma.sync only."""

        def offers(self, request: Request, workspace_limit_bytes: int) -> Offered:
            return Offered(tuple(map(Offer, of_family(request, self.spec))))

    names = tuple(kernel.name for kernel in KERNELS.values() if kernel.arithmetic_us is not None)
    with Gpu(pose=pose) as gpu, MmaBench(gpu, partial(KernelLibrary.open, kernels=names)) as bench:
        with ProfileWriter(path, bench.identity()) as writer:
            writer.record_constant("mma_sync_tflops", measured_peak(pose))
        needs = [need for job in jobs(pose, "auto") for need in needs_of(job, bench.spec)]
        return measure_on(bench, needs, path, seconds, link=False).failures


def rows_of(profile: Profile) -> list[dict[str, Any]]:
    """Return the row of each kernel that a profile has."""
    kernels: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples(profile, device_of(profile)):
        if sample.effort.family and sample.measured_us:
            shares = sample.effort.arithmetic_us / sample.measured_us, sample.effort.memory_us / sample.measured_us
            kernels[sample.effort.group.removeprefix(f"{OWN.name} ")].append(shares)
    refused = Counter(m.name for measured in profile.measurements.values() for m in measured if m.refused)
    return [_row(name, kernels[name], refused[name]) for name in sorted({*kernels, *refused})]


def _row(name: str, shares: Sequence[tuple[float, float]], refused: int) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "requests": len(shares), "refused": refused, "passed": False}
    if shares:
        of_peak, of_memory = zip(*shares, strict=True)
        row |= {"peak_share": max(of_peak), "memory_share": max(of_memory)}
        row["limit_share"] = median(map(max, of_peak, of_memory))
        row["passed"] = max(*of_peak, *of_memory) >= ASKED_SHARE and not refused
    return row


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path, nargs="?")
    parser.add_argument("--pose", default="sm_80")
    parser.add_argument("--for", dest="seconds", type=float, default=90.0, help="begin no measurement later")
    parser.add_argument("--count", action="store_true", help="only count the requests; needs no GPU")
    arguments = parser.parse_args()
    if arguments.count:
        counted = ((job, needs_of(job, find_device(job.gpu))) for job in jobs(arguments.pose))
        show([{"name": job.name, "requests": len(needs)} for job, needs in counted], ("name", "requests"))
        return
    if arguments.profile is None:
        parser.error("name the profile into which the measurements go, or use --count")
    need_gpu("--count lists the requests without one")
    for failure in measure(arguments.pose, arguments.profile, arguments.seconds):
        print(failure)
    profile = read_profile(arguments.profile)
    rows = rows_of(profile)
    show(rows, COLUMNS)
    print(f"mma.sync: {profile.constants['mma_sync_tflops']:.0f} TFLOP/s")
    print(write("posed_kernels", rows, pose=arguments.pose, mma_sync_tflops=profile.constants["mma_sync_tflops"]).name)


if __name__ == "__main__":
    start(main)
