"""`--record` of mbc train and mbc bench on a simulated GPU.

PyCUDA and the library are fakes; so is CUPTI below the real recorder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.bench import mbc_contender
from mbc.bench.contender_messages import Contender, Job, Result
from mbc.bench.race import record
from mbc.cli import bench_command, main
from mbc.errors import MbcError
from mbc.hardware.target import LocalGpu
from mbc.plan.file import PLAN_FILE, load_plan
from mbc.plan.model import Plan
from mbc.record import recorder as recorder_file
from mbc.record.recording import STEPS, WARM_STEPS
from mbc.runtime import cuda
from tests.bench.jobs import job
from tests.record.cupti import KERNEL, fake_cupti, report_node
from tests.runtime.conftest import gpu as gpu  # a fixture
from tests.runtime.fake_pycuda import FakeLibrary
from tests.runtime.nets import SMALL, package, small_plan

SLOWNESS = 3
GPU = LocalGpu("Fake", "580", "sm_90", 1 << 35, 1 << 34)


class RecordedLibrary(FakeLibrary):
    """A library that reports one node for each launch. Its nodes take `SLOWNESS` times the predicted time."""

    fake: Any = None

    def __init__(self, plan: Plan, folder: object) -> None:
        super().__init__(plan, folder)
        self.plan, self.replays = plan, 0

    def capture(self, listener: int | None = None) -> None:
        super().capture(listener)
        if listener is None:
            return
        for number, program in enumerate((self.plan.train, self.plan.infer)):
            for i in range(len(program.launches)):
                report_node(listener, number, i, 1000 * (number + 1) + i)

    def run(self, program: str, eager: bool) -> None:
        super().run(program, eager)
        if program != "train":
            return
        self.replays += 1
        now = self.replays * 10**9
        for i, launch in enumerate(self.plan.train.launches):
            end = now + round(launch.work.time_us * 1000 * SLOWNESS)
            self.fake.fake_ran(KERNEL, b"kernel", now, end, self.replays, 1000 + i, 1, 7)
            now = end


@pytest.fixture
def fake(gpu: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The fake CUPTI of a machine with a fake GPU."""
    with fake_cupti() as (tools, cupti):
        monkeypatch.setattr(RecordedLibrary, "fake", cupti)
        monkeypatch.setattr(cuda, "Library", RecordedLibrary)
        monkeypatch.setattr(recorder_file, "find_toolchain", lambda: tools)
        monkeypatch.setattr(recorder_file, "current_gpu", lambda: GPU)
        yield cupti
        assert cupti.fake_subscribers() == 0


@pytest.fixture
def mbc(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mbc.progress._PATIENCE_S", 1e6)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def training(tmp_path: Path) -> tuple[str, ...]:
    """Return a package and 8 mini-batches for it."""
    random = np.random.default_rng(0)
    images = random.standard_normal((48, 2, 6, 6)).astype(np.float32)
    np.savez(tmp_path / "data.npz", images=images, labels=random.integers(0, 5, 48))
    return str(package(tmp_path, small_plan())), "--data", str(tmp_path / "data.npz"), "--lr", "0.01"


def check(document: dict[str, Any], plan: Plan, steps: int) -> None:
    assert document["steps"] == steps and document["left"] == {} and len(document["rows"]) == len(plan.train.launches)
    for row, launch in zip(document["rows"], plan.train.launches, strict=True):
        assert row["measured_us"] == pytest.approx(SLOWNESS * launch.work.time_us, abs=2e-3)
        assert row["kernels"] == ["kernel"] and row["alone_us"] == launch.work.time_us


def test_a_training_records_its_first_steps(fake: Any, mbc: Callable[..., Any], training: tuple[str, ...]):
    code, out, err = mbc("train", *training, "--device", "cuda", "--epochs", "3", "--record", "step.json")
    assert code == 0, err
    assert "record of a step: step.json" in out and fake.fake_enabled() == 0
    document = json.loads(Path("step.json").read_text())
    plan = small_plan()
    # When the last step that counts was read, the step after it had begun.
    check(document, plan, STEPS + 1)
    (library,) = FakeLibrary.instances
    assert isinstance(library, RecordedLibrary) and library.replays == 24
    code, out, err = mbc("report", training[0], "--with", "step.json", "-o", "page.html")
    assert code == 0, err
    code, out, err = mbc("trace", training[0], "--with", "step.json", "-o", "trace.json")
    assert code == 0, err
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    measured = [event for event in events if event["pid"] == 3 and event["ph"] == "X"]
    assert [event["dur"] for event in measured] == [row["measured_us"] for row in document["rows"]]


def test_a_short_training_is_recorded_at_its_end(fake: Any, mbc: Callable[..., Any], training: tuple[str, ...]):
    code, out, err = mbc(
        "train", *training, "--device", "cuda", "--epochs", "1", "--record", "step.json", "--json", "--report", "p.html"
    )
    assert code == 0, err
    assert json.loads(out)["record"] == "step.json"
    check(json.loads(Path("step.json").read_text()), small_plan(), 8 - WARM_STEPS)
    assert '"measured"' in Path("p.html").read_text()


def test_a_training_on_the_cpu_has_nothing_to_record(mbc: Callable[..., Any], training: tuple[str, ...]):
    code, _, err = mbc("train", *training, "--device", "cpu", "--epochs", "1", "--record", "step.json")
    assert code == 1 and "MBC365: steps run on the CPU here: the work of a step is recorded on a GPU only" in err
    assert not Path("step.json").exists()


def test_a_record_that_cannot_be_written(fake: Any, mbc: Callable[..., Any], training: tuple[str, ...]):
    code, _, err = mbc("train", *training, "--epochs", "1", "--record", "nowhere/step.json")
    assert code == 1 and "MBC320" in err and "--record" in err and not FakeLibrary.instances


def test_a_refusal_of_cupti_leaves_nothing(fake: Any, mbc: Callable[..., Any], training: tuple[str, ...]):
    fake.fake_fail(39)
    code, _, err = mbc("train", *training, "--device", "cuda", "--epochs", "1", "--record", "step.json")
    assert code == 1 and "MBC367: another tool uses CUPTI in this process" in err
    assert not Path("step.json").exists() and not FakeLibrary.instances


def test_a_module_without_a_record_listens_to_nothing(fake: Any, mbc: Callable[..., Any], training: tuple[str, ...]):
    assert mbc("train", *training, "--device", "cuda", "--epochs", "1")[0] == 0
    (library,) = FakeLibrary.instances
    assert library.listener is None


def test_a_contender_records_in_the_place_of_racing(fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from mbc.bench import race

    plan = small_plan()
    race_job = job(tmp_path)
    folder = tmp_path / "built"
    folder.mkdir()
    package(folder, plan)
    monkeypatch.setattr(race, "run_apart", lambda job, contender, timeout_s: mbc_contender.run(job, contender))
    recorded = record(race.replace(race_job, package=str(folder), device="cuda"), 1, 60.0)
    assert recorded.steps == STEPS and len(recorded.launches) == len(plan.train.launches)
    assert fake.fake_enabled() == 0


def test_a_race_begins_with_a_record(
    fake: Any, mbc: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """An impossible recording is refused before anything is timed. The race itself is not recorded."""
    Path("small.mbc").write_text(SMALL)
    built = tmp_path / "built"
    built.mkdir()
    raced: list[str] = []

    def run(job: Job, contender: Contender, timeout_s: float) -> Result:
        raced.append(f"{contender.peer}{' recorded' if job.record else ''}")
        if job.record:
            try:
                return mbc_contender.run(job, contender)
            except MbcError as error:  # of which the process dies
                return Result(problem=str(error))
        return Result(losses=(1.0,), step_ms=2.0, steps=2)

    monkeypatch.setattr("mbc.bench.race.run_apart", run)
    monkeypatch.setattr("mbc.bench.contender_messages.missing", lambda peers: ())
    monkeypatch.setattr(bench_command, "current_gpu", lambda: GPU)
    monkeypatch.setattr(bench_command, "_package", lambda planned, folder, on_gpu: package(built, planned.plan))
    monkeypatch.setattr(bench_command, "_floor", lambda planned, asked: None)
    asked = ("bench", "small.mbc", "--gpu", "h200", "--against", "torch", "--measure", "never", "--record", "step.json")
    code, out, err = mbc(*asked)
    assert code == 0, err
    assert raced[:2] == ["mbc recorded", "mbc"] and raced[-1] == "mbc" and raced.count("mbc recorded") == 1
    plan = load_plan((built / PLAN_FILE).read_text(), PLAN_FILE)
    check(json.loads(Path("step.json").read_text()), plan, STEPS)
    assert f"{len(plan.train.launches)} of {len(plan.train.launches)} launches recorded" in out
    assert out.endswith("record of a step: step.json\n")
    fake.fake_fail(35)
    raced.clear()
    Path("step.json").unlink()
    code, out, err = mbc(*asked)
    assert code == 1 and "MBC220" in err and "cannot be recorded" in err and "INSUFFICIENT_PRIVILEGES" in err
    assert raced == ["mbc recorded"] and not Path("step.json").exists()
    assert mbc(*asked, "--device", "cpu")[0] == 1
