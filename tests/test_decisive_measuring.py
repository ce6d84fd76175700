"""A compilation for a GPU that nobody measured.

The kernels that can decide its plan are measured, and the plan is as good as with all kernels measured. The times
are those of the bundled profile, reported as if they were measured.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest

from mbc import measuring
from mbc.compiler import compile_plan
from mbc.hardware.spec import find_spec
from mbc.measure.fleet import Outcome, Progress, Task
from mbc.measure.measure import Summary
from mbc.optimize import effort
from mbc.optimize.search.decisive_requests import Decisive
from mbc.optimize.search.profiling_requests import chosen_by_estimate, unmeasured
from mbc.options import Measure, Options
from mbc.profile import locate as profile_places
from mbc.profile import paths
from mbc.profile.model import LEFT_TO_ESTIMATE, Extent, Profile
from mbc.profile.paths import bundled_path, user_path
from mbc.profile.read_profile import read_profile
from mbc.profile.signature import signature
from mbc.profile.writer import ProfileWriter
from mbc.source import Source
from tests.profile.profiles import GPU

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Source("resnet.mbc", (ROOT / "examples" / "resnet.mbc").read_text(encoding="utf-8"))
SETTINGS = (("depth", "18"), ("batch", "256"), ("train.precision", "bf16"))
SHIPPED = bundled_path(GPU.name)
DECIDED = 1 - effort.UNDECIDED_SHARE / effort.OPTIMISM  # of a step, by its estimates, is measured
OPTIONS = Options(gpu="h200", settings=SETTINGS)


@dataclass
class Machine:
    """A machine that measures what `decide` selects, or the whole task, and records its requests."""

    times: Profile
    tasks: list[Task] = field(default_factory=list[Task])
    measured: set[str] = field(default_factory=set[str])
    most: float = math.inf  # is measured before somebody interrupts

    def measure_on(self, gpus: tuple[str, ...], task: Task, progress: Callable[[Progress], None]) -> Outcome:
        self.tasks.append(task)
        missing = {signature(request): request for need in task.needs for request in need.requests}
        asked, recorded = len(missing), self.times.measurements
        failed = [key for key in missing if key not in recorded]
        with ProfileWriter(task.path, self.times.identity) as writer:
            for key in failed:
                writer.record(missing.pop(key), (), Extent(task.workspace_limit_bytes, "could not be measured"))
        chosen = tuple(missing)
        while chosen and len(self.measured) < self.most:
            if task.decide is not None:
                chosen = task.decide(failed, missing).requests
            with ProfileWriter(task.path, self.times.identity) as writer:
                for key in chosen[: None if math.isinf(self.most) else int(self.most)]:
                    writer.record(missing.pop(key), recorded[key], Extent(task.workspace_limit_bytes))
                    self.measured.add(key)
            chosen = chosen if task.decide is not None else ()
        with ProfileWriter(task.path, self.times.identity) as writer, writer.all_at_once():
            for request in missing.values():
                writer.record(request, (), Extent(0, LEFT_TO_ESTIMATE))
        return Outcome(Summary(measured=asked - len(missing)), 0, False)


@cache
def shipped() -> Profile:
    """Return the bundled profile, with the times of earlier kernel versions taken as current."""
    bundled = read_profile(SHIPPED)
    keys = {*bundled.measurements, *bundled.earlier}
    measurements = {k: (*bundled.measurements.get(k, ()), *bundled.earlier.get(k, ())) for k in keys}
    return replace(bundled, measurements=measurements, earlier={}, outdated={})


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Simulate a machine with an H200 and no profile."""
    simulated = Machine(shipped())
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(paths, "BUNDLED", tmp_path / "shipped")
    monkeypatch.setattr(profile_places, "local_gpus", lambda: ())
    monkeypatch.setattr(profile_places, "installed_cudnn", lambda: simulated.times.cudnn)
    monkeypatch.setattr(measuring, "gpus_named", lambda name: ("0",))
    monkeypatch.setattr(measuring, "measure_on", simulated.measure_on)
    monkeypatch.setattr(measuring, "find_toolchain", lambda: type("Toolchain", (), {"nvcc": Path("nvcc")}))
    monkeypatch.setattr(measuring.importlib.util, "find_spec", lambda name: object())
    return simulated


def test_a_plan_of_less_than_half_of_the_measurements_is_as_good(machine: Machine) -> None:
    plan = compile_plan(SOURCE, replace(OPTIONS, measure=Measure.MISSING))
    needs = len(machine.tasks[0].needs)
    assert isinstance(machine.tasks[0].decide, Decisive) and 0 < len(machine.measured) < 0.5 * needs
    assert plan.predictions.measured_share > DECIDED
    first = set(machine.measured)
    compile_plan(SOURCE, replace(OPTIONS, measure=Measure.MISSING))
    assert machine.measured == first

    path = user_path(GPU.name)
    path.unlink()
    compile_plan(SOURCE, replace(OPTIONS, measure=Measure.ALWAYS))
    assert len(machine.measured) > 2 * len(first)
    best = compile_plan(SOURCE, replace(OPTIONS, measure=Measure.NEVER))
    assert plan.predictions.train_us < 1.01 * best.predictions.train_us


def test_a_plan_after_an_interrupt_is_no_worse_than_without_measuring(machine: Machine) -> None:
    guess = compile_plan(SOURCE, replace(OPTIONS, measure=Measure.NEVER)).predictions.train_us
    machine.most = 30
    plan = compile_plan(SOURCE, replace(OPTIONS, measure=Measure.MISSING))
    assert len(machine.measured) == 30 and 0.2 < plan.predictions.measured_share < 0.9
    machine.most = math.inf
    best = compile_plan(SOURCE, replace(OPTIONS, measure=Measure.MISSING))
    assert best.predictions.measured_share > DECIDED
    assert best.predictions.train_us < plan.predictions.train_us < 1.1 * guess


def test_requests_measured_on_a_similar_gpu_are_measured_here(machine: Machine) -> None:
    """Times of the similar GPU are estimates here, and plans use them only if nothing can be measured."""
    here = find_spec("h100")
    machine.times = replace(machine.times, identity=replace(machine.times.identity, gpu=here.name))
    paths.BUNDLED.mkdir()
    shutil.copy(SHIPPED, paths.BUNDLED)
    options = replace(OPTIONS, gpu="h100", measure=Measure.MISSING)
    assert compile_plan(SOURCE, options).predictions.measured_share > DECIDED
    assert len(machine.measured) > 80


def test_kernels_chosen_by_estimate_are_measured(machine: Machine) -> None:
    """A second network may use kernels that the first network does not need."""
    compile_plan(SOURCE, replace(OPTIONS, measure=Measure.MISSING))
    path = user_path(GPU.name)
    recorded = read_profile(path)
    chosen = max(machine.measured, key=lambda key: min(m.time_us for m in recorded.measurements[key] if not m.refused))
    with ProfileWriter(path, recorded.identity) as writer:
        writer.record_signature(chosen, 256, (), Extent(0, LEFT_TO_ESTIMATE))
    machine.measured.clear()
    plan = compile_plan(SOURCE, replace(OPTIONS, measure=Measure.MISSING))
    assert chosen in machine.measured and plan.predictions.measured_share > DECIDED
    assert (decision := machine.tasks[-1].decision) is not None and chosen in decision.requests


def test_slow_kernels_chosen_by_estimate_are_measured() -> None:
    """Within a budget a plan may choose kernels that the step without a limit does not."""
    plan = compile_plan(SOURCE, OPTIONS)
    estimated = compile_plan(SOURCE, replace(OPTIONS, gpu="rtx-4090"))
    bundled = read_profile(SHIPPED)
    assert chosen_by_estimate(estimated, bundled) == ()
    everything = frozenset(map(signature, unmeasured(estimated)))
    left = replace(bundled, left_to_estimate=everything)
    assert set(map(signature, chosen_by_estimate(estimated, left))) == everything != set()
    least = min(unmeasured(estimated), key=lambda request: sum(t.size_bytes for t in request.inputs))
    assert chosen_by_estimate(estimated, replace(bundled, left_to_estimate=frozenset([signature(least)]))) == ()
    # It has measured them, but for kernels that were rewritten since, or came later on a similar GPU.
    by_estimate = set(map(signature, chosen_by_estimate(plan, left)))
    assert by_estimate <= bundled.earlier.keys() | bundled.measurements.keys() and by_estimate < everything
