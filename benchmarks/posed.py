"""Steps of a GPU that poses as older ones, beside `torch.compile` in the same run with everything that the GPU has.

Each row is a network, an architecture, and either any kernel that runs, or mbc's own kernels, which all pose, for all
operations that they run on tensor cores. Libraries do not pose; the second kind of row leaves them above all filter
gradients. `library_launches` counts theirs. ResNet-50 trains as each architecture, ten more networks train as sm_80.
`speedup` is the step of the fastest variant of `torch.compile` over mbc's; `asked` is the least speedup that was asked
for. PyTorch does not pose, so that it is timed once in a run for all rows of one network and precision. Networks of
torchvision are imported once (`imported_sources.py`).

    python benchmarks/posed.py [--only NAME ...] [--again] [--modes default] [--variant WORD] [--measure-for 60s]
                               [--most 90]
    python benchmarks/posed.py --plan-only [--only "resnet50 128"]

The first row of a network takes some 4 minutes. `--modes default,max-autotune` also tries PyTorch's slower mode; give
`--most` more time then. `--variant "CUDA graph"` times only the variants of `torch.compile` whose names contain this
word; `torch_variant` is the name of the fastest one. The last line has the least and the median speedup of the networks
beside ResNet-50.

`--plan-only` plans the steps for an H200 that poses, without a GPU, and writes no results.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from imported_sources import written
from modules import median
from record import ROOT, attempt, need_gpu, results, show, start

from mbc.bench.contender_messages import MBC, Contender, Job, Result, contenders
from mbc.bench.race import TOLERANCES, Race, compared, run_apart
from mbc.compiler import compile_plan
from mbc.ir.types import Precision
from mbc.options import OWN_FIRST, Options
from mbc.plan.file import PLAN_FILE, load_plan
from mbc.report.devices import library_launches
from mbc.source import Source

OWN = (OWN_FIRST,)
TORCH = "torch.compile"
TIMEOUT_S = 3600.0
LEAST, MEDIAN = 1.05, 1.25  # speedups of the ten networks
COLUMNS = (
    "name", "asked", "mbc_ms", "torch_ms", "torch_variant", "speedup", "predicted_ms", "measured_share",
    "library_launches", "same_mathematics",
)  # fmt: skip


Peers = dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[Contender, Result]]]


@dataclass(frozen=True)
class Limits:
    """Time limits of a row, and what is tried of `torch.compile`.

    Attributes:
        measure_for: Time limit of measuring mbc's kernels, as `mbc compile` takes it.
        most_s: Time limit of each contender, in seconds.
        modes: Modes of `torch.compile`.
        variant: A word that the names of the variants of `torch.compile` contain.
    """

    measure_for: str = "60s"
    most_s: float = 90.0
    modes: tuple[str, ...] = ("default",)
    variant: str = ""

    @property
    def variant_option(self) -> tuple[str, ...]:
        """The option that names the word, if there is one."""
        return (f"--variant '{self.variant}'",) if self.variant else ()

    def variants(self, precision: Precision) -> list[Contender]:
        """Return the variants of `torch.compile` that are timed.

        Raises:
            SystemExit: No name of a variant contains the word.
        """
        variants = [peer for peer in contenders(TORCH, precision, True, self.modes) if self.variant in peer.variant]
        if not variants:
            raise SystemExit(f"no variant of {TORCH} contains '{self.variant}': --variant \"CUDA graph\" is one")
        return variants


@dataclass(frozen=True)
class Case:
    """One step: a network as an architecture.

    Attributes:
        network: File in `examples/`, or a network of torchvision as `torchvision/name`.
        pose: Architecture as which the GPU poses.
        asked: Least speedup over `torch.compile`; 0 for a row that is only reported.
        settings: Settings of the source.
        providers: Providers of kernels; empty for any.
    """

    network: str
    pose: str
    asked: float
    settings: tuple[tuple[str, str], ...]
    providers: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The source of the network, which is imported if it does not exist."""
        return written(self.network) if "/" in self.network else ROOT / "examples" / f"{self.network}.mbc"


def _cases() -> dict[str, Case]:
    """Return all cases by name."""
    half, resnet = (("train.precision", "bf16"),), (("batch", "128"), ("depth", "50"))
    cases: dict[str, Case] = {}
    for pose, any_kernel, own in (("sm_80", 1.45, 1.25), ("sm_86", 1.35, 1.2), ("sm_89", 1.35, 1.2)):
        cases[f"resnet50 128 {pose}, any kernel"] = Case("resnet", pose, any_kernel, (*resnet, *half))
        cases[f"resnet50 128 {pose}, own kernels"] = Case("resnet", pose, own, (*resnet, *half), OWN)
    of_turing = (*resnet, ("train.precision", "fp16"))
    cases["resnet50 128 sm_75, any kernel"] = Case("resnet", "sm_75", 0.0, of_turing)
    for name, network, settings in (
        ("resnet18 256", "resnet", (("batch", "256"), ("depth", "18"))),
        ("densenet121 128", "densenet121", (("batch", "128"),)),
        ("mobilenet_v2 128", "mobilenet_v2", (("batch", "128"),)),
        ("efficientnet_b0 64", "torchvision/efficientnet_b0", ()),
        ("convnext_tiny 64", "torchvision/convnext_tiny", ()),
        ("unet", "unet", ()),
        ("vgg16 64", "vgg16", (("batch", "64"),)),
        ("regnet_y_1_6gf 64", "torchvision/regnet_y_1_6gf", ()),
        ("vit_b_16 64", "torchvision/vit_b_16", ()),
        ("3-D unet", "nnunet", ()),
    ):
        cases[f"{name} sm_80, any kernel"] = Case(network, "sm_80", LEAST, (*settings, *half))
    return cases


CASES = _cases()


def planned(case: Case) -> dict[str, Any]:
    """Plan a case for an H200 that poses, and return the figures of the plan."""
    source = Source(case.path.name, case.path.read_text(encoding="utf-8"))
    plan = compile_plan(source, Options(f"h200@{case.pose}", case.settings, providers=case.providers))
    p = plan.predictions
    return {
        "asked": case.asked, "predicted_ms": p.train_us / 1e3, "measured_share": p.measured_share,
        "library_launches": library_launches(plan),
    }  # fmt: skip


def command(case: Case, package: Path, measure_for: str) -> list[str]:
    """Return the command that measures kernels on this machine's GPU and builds the package of a case.

    Args:
        case: The case.
        package: Folder of the package.
        measure_for: Time limit of measuring, as `mbc compile` takes it.
    """
    return [
        sys.executable, "-m", "mbc", "compile", str(case.path), "--gpu", f"auto@{case.pose}", "-o", str(package),
        "--measure-for", measure_for, *(word for name, value in case.settings for word in ("--set", f"{name}={value}")),
        *(word for provider in case.providers for word in ("--provider", provider)),
    ]  # fmt: skip


def timed(case: Case, limits: Limits, peers: Peers) -> dict[str, Any]:
    """Build a case, time it twice, compare it with `torch.compile`, and return its figures.

    The first case of a network times `torch.compile` between its two turns. Later cases use these results.

    Args:
        case: The case.
        limits: Time limits, and modes of `torch.compile`.
        peers: Results of `torch.compile` by network and settings, to which missing ones are added.
    """
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "posed"
        building = command(case, package, limits.measure_for)
        done = subprocess.run(building, cwd=ROOT, text=True, capture_output=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise SystemExit(done.stderr.strip() or f"mbc compile ended with {done.returncode}")
        plan = load_plan((package / PLAN_FILE).read_text(encoding="utf-8"), PLAN_FILE)
        job = Job(Source(case.path.name, case.path.read_text("utf-8")), case.settings, None, str(package), "cuda")

        def run(contender: Contender) -> Result:
            print(f"timing {contender.peer} {contender.variant} ...", file=sys.stderr, flush=True)
            return run_apart(job, contender, limits.most_s)

        ours = run(Contender(MBC))
        if ours.problem:
            raise SystemExit(ours.problem)
        precision = plan.graph.precision
        network = (case.network, case.settings)
        if network not in peers:
            peers[network] = [(peer, run(peer)) for peer in limits.variants(precision)]
        again = run(Contender(MBC))
    tolerance = TOLERANCES[precision]
    entries = tuple(compared(peer, result, ours, tolerance) for peer, result in peers[network])
    result = Race(ours, None, tolerance, entries)
    mbc_ms, best = ours.step_ms if again.problem else (ours.step_ms + again.step_ms) / 2, result.best(TORCH)
    torch_ms = None if best is None else best.result.step_ms
    speedup = torch_ms and torch_ms / mbc_ms
    return {
        "planned_for": plan.target.gpu, "predicted_ms": plan.predictions.train_us / 1e3,
        "measured_share": plan.predictions.measured_share, "same_mathematics": result.fair,
        "asked": case.asked, "mbc_ms": mbc_ms, "torch_ms": torch_ms, "speedup": speedup,
        "torch_variant": None if best is None else best.contender.variant, "library_launches": library_launches(plan),
        "options": [f"--measure-for {limits.measure_for}", f"--modes {','.join(limits.modes)}", *limits.variant_option],
        "passed": speedup is not None and result.fair and speedup >= case.asked if case.asked else None,
    }  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return the least and the median speedup of the networks beside ResNet-50, and what was asked for."""
    ratios = [row["speedup"] for row in rows if not row["name"].startswith("resnet50") and row.get("speedup")]
    if not ratios:
        return "no network beside ResNet-50 was timed"
    of = f"{len(ratios)} networks: speedup {min(ratios):.2f} at least, {median(ratios):.2f} in the median"
    return f"{of} (asked: {LEAST} and {MEDIAN})"


def chosen(only: Sequence[str]) -> list[str]:
    """Return the names of the cases that contain one of these words; all names without words."""
    return [name for name in CASES if not only or any(word in name for word in only)]


def main() -> None:
    """Time or plan the cases, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME", help="cases whose names contain a word")
    parser.add_argument("--again", action="store_true", help="also cases that have results")
    parser.add_argument("--modes", default="default", help="modes of torch.compile")
    parser.add_argument("--variant", default="", metavar="WORD", help="variants of torch.compile that are timed")
    parser.add_argument("--measure-for", default="60s", metavar="TIME", help="measure mbc's kernels for at most TIME")
    parser.add_argument("--most", type=float, default=90.0, metavar="SECONDS", help="time limit of each contender")
    parser.add_argument("--plan-only", action="store_true", help="plan without a GPU, and write no results")
    asked = parser.parse_args()
    names = chosen(asked.only)
    if asked.plan_only:
        warnings.filterwarnings("ignore")
        for name in names:
            show([attempt(partial(planned, CASES[name]), name)], COLUMNS)
        return
    need_gpu("--plan-only plans the steps without one")
    limits, peers = Limits(asked.measure_for, asked.most, tuple(asked.modes.split(",")), asked.variant), Peers()
    limits.variants(Precision.BF16)  # an unknown word ends the run before minutes of compilation
    kept = results("posed", asked.again)
    for name in names:
        if not kept.done(name):
            kept.put(attempt(partial(timed, CASES[name], limits, peers), name))
            kept.arrange(list(CASES))
    show(list(kept.rows.values()), COLUMNS)
    print(summary(list(kept.rows.values())))


if __name__ == "__main__":
    start(main)
