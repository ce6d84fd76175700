"""Steps of a GPU that poses: every case is one that mbc takes, and figures come from what `mbc bench` writes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import posed

from mbc.bench.contender_messages import MBC, Contender, Result
from mbc.cli.arguments import parse as parse_arguments
from mbc.compiler import compile_plan
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.hardware.target import find_device
from mbc.options import Options
from mbc.plan.file import PLAN_FILE, dump_plan
from mbc.plan.model import Kernel
from mbc.source import Source


@pytest.mark.parametrize("name", posed.CASES)
def test_every_case_is_one_that_mbc_takes(name: str) -> None:
    case = posed.CASES[name]
    assert find_device(f"h200@{case.pose}").architecture == case.pose
    if "/" in case.network:
        return  # to write it takes torchvision
    arguments = parse_arguments(posed.command(case, Path("here"), "60s")[3:])
    assert arguments.gpu == f"auto@{case.pose}" and tuple(arguments.providers) == case.providers
    lowered = lower(parse(Source(case.path.name, case.path.read_text())), case.settings, None)
    assert str(lowered.precision) == dict(case.settings)["train.precision"]


@pytest.mark.parametrize(("torch_ms", "passes"), [(3.0, True), (2.9, True), (2.89, False), (None, False)])
def test_figures_of_rows_that_share_a_peer(
    monkeypatch: pytest.MonkeyPatch, torch_ms: float | None, passes: bool
) -> None:
    case = posed.CASES["resnet50 128 sm_80, any kernel"]
    plan = compile_plan(Source(case.path.name, case.path.read_text()), Options("h200@sm_80", case.settings))
    ran: list[str] = []

    def build(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("-o") + 1])
        folder.mkdir()
        (folder / PLAN_FILE).write_text(dump_plan(plan))
        return subprocess.CompletedProcess(command, 0)

    def run(job: object, contender: Contender, most_s: float) -> Result:
        ran.append(contender.peer)
        if contender.peer == MBC:
            return Result((1.0, 0.9), step_ms=(1.9, 2.1)[ran.count(MBC) % 2])
        return Result(problem="no GPU") if torch_ms is None else Result((1.0, 0.9), step_ms=torch_ms)

    monkeypatch.setattr(subprocess, "run", build)
    monkeypatch.setattr(posed, "run_apart", run)
    peers = posed.Peers()
    rows = [posed.timed(case, posed.Limits(), peers) for _ in range(2)]
    for row in rows:
        assert row["passed"] == passes and row["torch_ms"] == torch_ms and row["mbc_ms"] == pytest.approx(2.0)
        assert row["speedup"] == (None if torch_ms is None else pytest.approx(torch_ms / 2))
    variants = ran.count(posed.TORCH)
    assert ran == [MBC, *(posed.TORCH,) * variants, MBC, MBC, MBC] and variants >= 1
    only_reported = replace(case, asked=0.0)
    assert posed.timed(only_reported, posed.Limits(), peers)["passed"] is None, "a row without a goal reaches none"


def test_the_ten_networks_are_summed_up() -> None:
    rows = [{"name": f"net{n}", "speedup": 1.1 + n / 10} for n in range(3)]
    others = [{"name": "resnet50 128 sm_80, any kernel", "speedup": 0.5}, {"name": "vit", "failed": "no torch"}]
    assert posed.summary([*rows, *others]).startswith("3 networks: speedup 1.10 at least, 1.20 in the median")
    assert posed.summary(others) == "no network beside ResNet-50 was timed"


def test_own_kernels_leave_to_libraries_what_they_do_not_run_on_tensor_cores() -> None:
    source = Source("resnet.mbc", (posed.ROOT / "examples" / "resnet.mbc").read_text(encoding="utf-8"))
    settings = (("batch", "32"), ("depth", "18"), ("train.precision", "bf16"))
    plan = compile_plan(source, Options("h200@sm_80", settings, providers=posed.OWN))
    of_libraries = {
        launch.work.name
        for launch in plan.train.launches
        if isinstance(launch.work, Kernel) and launch.work.provider != "mbc"
    }
    assert "linear" in of_libraries and not any(kind.startswith("convolution") for kind in of_libraries)
    assert any(
        isinstance(work := launch.work, Kernel) and work.name == "implicit_gemm" for launch in plan.infer.launches
    )
