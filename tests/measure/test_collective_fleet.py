"""Measuring collectives: processes that meet, and the consequences if one dies, hangs or fails."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mbc.errors import MbcError
from mbc.hardware.collective_times import CollectiveKind, Link
from mbc.hardware.target import LocalGpu
from mbc.ir.types import Precision
from mbc.measure import collective_fleet
from mbc.measure.collective_fleet import Measured, measure_collectives
from mbc.measure.collective_timing import MAX_CTAS
from mbc.measure.workbench import CONCURRENT_KERNELS
from mbc.profile.read_profile import read_profile
from tests.profile.profiles import GPU

HERE = LocalGpu(GPU.name, "580.1", GPU.architecture, GPU.memory_bytes, GPU.memory_bytes, "GPU-x")


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    monkeypatch.setattr(collective_fleet, "local_gpus", lambda: (HERE, HERE))
    monkeypatch.setattr(collective_fleet, "link_between", lambda uuids: Link.NVLINK)


def measured(path: Path, behaviour: str = "", **more: Any) -> tuple[Measured, list[str], list[object]]:
    notes: list[str] = []
    built: list[object] = []

    def build(architecture: str, precision: Precision, library: Path) -> None:
        built.append((architecture, precision))

    worker = (sys.executable, "-m", "tests.measure.fake_collective_worker", *filter(None, [behaviour]))
    return measure_collectives(("0", "1"), path, notes.append, worker, build, **more), notes, built


def test_results_go_into_the_profile(tmp_path: Path):
    path = tmp_path / "p.sqlite"
    results, notes, built = measured(path)
    assert built == [("sm_90", Precision.BF16)]
    assert notes[1:] == [f"{n} thread blocks" for n in MAX_CTAS]
    held = read_profile(path)
    assert set(held.collectives) == set(results.times) and set(held.collective_slowdowns) == set(results.slowdowns)
    assert held.collective_model(Link.NVLINK).time_us(CollectiveKind.ALL_REDUCE, 4, 2, 16) == 160.0
    assert held.collective_bytes(2) == 1 << 20


@pytest.mark.parametrize(
    ("behaviour", "code", "text"),
    [
        ("dies", "MBC275", "collectives were not measured: the process of GPU 1 died (exit status 7)"),
        ("hangs", "MBC275", "collectives were not measured: no process sent a message for 6 s"),
        ("refuses", "MBC272", "rank 0 is gone"),
    ],
)
def test_one_that_fails_ends_them_all(tmp_path: Path, behaviour: str, code: str, text: str, monkeypatch):
    started: list[Any] = []
    original = subprocess.Popen

    def popen(*arguments: Any, **more: Any) -> Any:
        started.append(original(*arguments, **more))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    began_s = time.monotonic()
    with pytest.raises(MbcError) as caught:
        measured(tmp_path / "p.sqlite", behaviour, silent_s=6.0 if behaviour == "hangs" else 60.0)
    assert (caught.value.code, caught.value.message) == (code, text)
    assert len(started) == 2 and all(process.poll() is not None for process in started)
    assert time.monotonic() - began_s < 60
    # What was measured before is kept.
    assert [t.max_ctas for t in read_profile(tmp_path / "p.sqlite").collectives] == [MAX_CTAS[0]]


def test_one_gpu_has_no_collectives(tmp_path: Path):
    with pytest.raises(MbcError) as caught:
        measure_collectives(("0",), tmp_path / "p.sqlite")
    assert caught.value.code == "MBC274"
    assert caught.value.message == "collectives need two GPUs or more, but this machine has 1 that can be used"


def test_the_kernels_beside_are_there():
    from mbc.codegen.render_sources import files_defining
    from mbc.codegen.view import LIBRARIES
    from mbc.kernels.cuda import symbols_of

    files = files_defining(symbols_of(CONCURRENT_KERNELS), LIBRARIES)
    assert "batch_norm.cu" in files and len(files) < 8
