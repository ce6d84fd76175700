"""Measuring before planning: the times that no profile has, only on a machine with the GPU, only if permitted."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mbc import measuring
from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.hardware.spec import find_spec
from mbc.kernels.base import Request
from mbc.measure.fleet import Outcome, Progress, Task
from mbc.measure.measure import Summary
from mbc.measure.need import MOST_WORKSPACE_BYTES, Decision, Need
from mbc.measuring import Measuring, missing, progress_text, shortcomings
from mbc.optimize.candidates.user_rules import Rules
from mbc.options import Measure, Options, Policy
from mbc.profile import locate as profile_places
from mbc.profile import paths
from mbc.profile.edit import write_profile
from mbc.profile.model import Extent
from mbc.profile.paths import user_path
from mbc.profile.read_profile import read_profile
from mbc.profile.signature import signature
from mbc.profile.writer import ProfileWriter
from mbc.source import Source
from mbc.stages import Stages
from tests.profile.profiles import GPU, IDENTITY, measurement, profile, request

ASKED = Options(gpu="h200", measure=Measure.MISSING)
LITTLE = "620025600B"  # with what kernels take beside the arena; a step of `NETWORK` is slower by its small workspaces
NETWORK = Source(
    "n.mbc",
    """
    network n(batch = 8) {
      input x[batch, 8, 6, 6] : float
      input t[batch] : class
      y = x |> conv(8, 3, pad=1) |> relu |> global_avgpool |> linear(3)
      output y
      loss (y, t) |> softmax_cross_entropy
    }
    """,
)


@dataclass
class Fleet:
    """Replaces the measuring processes: it records their tasks, and writes a time for every request."""

    tasks: list[Task]
    gpus: tuple[str, ...] = ("0", "1")
    interrupt_after: float = math.inf
    interrupted: bool = False  # in the last of them
    now_s: float = 0.0

    def measure_on(self, gpus, task, progress):
        assert gpus == self.gpus[:1], "a compilation takes one GPU"
        self.tasks.append(task)
        requests = [r for need in task.needs for r in need.requests]
        done = 0
        with ProfileWriter(task.path, IDENTITY) as writer:
            for done, one in enumerate(requests[: int(min(self.interrupt_after, len(requests)))], 1):
                progress(Progress(done - 1, len(requests), one, None))
                writer.record(one, [], Extent(task.workspace_limit_bytes))
        self.now_s += 20.0
        return Outcome(Summary(measured=done), len(requests) - done, self.interrupted or done < len(requests))

    @property
    def asked(self) -> list[str]:
        return [signature(r) for task in self.tasks for need in task.needs for r in need.requests]


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """A machine with two H200 and without measurements."""
    simulated = Fleet([])
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(paths, "BUNDLED", tmp_path / "shipped")
    monkeypatch.setattr(profile_places, "local_gpus", lambda: ())
    monkeypatch.setattr(profile_places, "installed_cudnn", lambda: IDENTITY.cudnn)
    monkeypatch.setattr(measuring, "gpus_named", lambda name: simulated.gpus if name == GPU.name else ())
    monkeypatch.setattr(measuring, "measure_on", simulated.measure_on)
    monkeypatch.setattr(measuring, "find_toolchain", lambda: SimpleNamespace(nvcc=Path("nvcc")))
    monkeypatch.setattr(measuring, "time", SimpleNamespace(monotonic=lambda: simulated.now_s))
    monkeypatch.setattr(measuring.importlib.util, "find_spec", lambda name: object())
    (tmp_path / "shipped").mkdir()
    return simulated


def chosen(requests: Sequence[Request], options: Options = ASKED) -> bool:
    return Measuring(None, GPU, Rules(), options).chosen(requests)  # pyright: ignore[reportArgumentType]


def test_a_compilation_measures_once_and_then_knows(fleet: Fleet):
    compile_plan(NETWORK, ASKED)
    extents = read_profile(user_path(GPU.name)).extents
    assert set(fleet.asked) == set(extents) and len(fleet.asked) == len(extents) > 10
    assert {task.workspace_limit_bytes for task in fleet.tasks} == {MOST_WORKSPACE_BYTES}
    compile_plan(NETWORK, ASKED)
    assert len(fleet.tasks) == 1


def test_micro_batches_are_measured_where_memory_costs_time(fleet: Fleet):
    compile_plan(NETWORK, ASKED)  # with memory for the fastest kernels undivided
    assert len(fleet.tasks) == 1 and all(len(need.requests) == 1 for need in fleet.tasks[0].needs)
    compile_plan(NETWORK, replace(ASKED, settings=(("memory.device", LITTLE),)))
    whole, parts = fleet.tasks
    assert not {signature(r) for need in parts.needs for r in need.requests} & {
        signature(need.undivided) for need in whole.needs
    }
    compile_plan(NETWORK, replace(ASKED, settings=(("memory.device", LITTLE),)))
    assert len(fleet.tasks) == 2


def test_a_budget_that_is_refused_is_searched_again_only_with_new_times(fleet: Fleet):
    refused = replace(ASKED, settings=(("memory.device", "620015kB"),))
    for tasks, searches in ((2, 1), (2, 0)):
        stages = Stages()
        with pytest.raises(MbcError, match="MBC204"):
            compile_plan(NETWORK, refused, stages)
        assert len(fleet.tasks) == tasks and ("search again" in stages.seconds) == searches
        assert stages.seconds["search"] > 0


def test_requests_that_must_be_divided_are_measured_divided(fleet: Fleet):
    compile_plan(NETWORK, replace(ASKED, micro_batch=2))
    (task,) = fleet.tasks
    assert any("[2, 8, 6, 6]" in key for key in fleet.asked) and max(len(need.requests) for need in task.needs) > 1


def test_the_time_for_measuring_is_that_of_all_steps(fleet: Fleet):
    compile_plan(NETWORK, replace(ASKED, measure_for_s=100.0, settings=(("memory.device", LITTLE),)))
    assert [task.measure_for_s for task in fleet.tasks] == [100.0, 80.0]


def test_nothing_more_is_measured_after_an_interrupt_in_the_last_request(fleet: Fleet):
    fleet.interrupted = True
    compile_plan(NETWORK, replace(ASKED, settings=(("memory.device", LITTLE),)))
    assert len(fleet.tasks) == 1


def test_micro_batches_wait_until_all_is_measured_undivided(fleet: Fleet):
    fleet.interrupt_after = 3
    with pytest.warns(RuntimeWarning, match="measuring was interrupted"):
        compile_plan(NETWORK, replace(ASKED, settings=(("memory.device", LITTLE),)))
    assert len(fleet.tasks) == 1


def test_other_networks_and_sizes_are_missing_again(fleet: Fleet):
    compile_plan(NETWORK, replace(ASKED, policy=Policy.UNDIVIDED))
    first = set(fleet.asked)
    compile_plan(NETWORK, replace(ASKED, settings=(("memory.device", LITTLE),)))
    second = set(fleet.asked) - first
    assert second and all(f"[{rows}, 8, 6, 6]" not in key for key in second for rows in (8,))
    compile_plan(NETWORK, replace(ASKED, settings=(("train.precision", "bf16"),)))
    assert all('"precision":"bf16"' in key for key in set(fleet.asked) - first - second)


def test_a_raised_limit_of_workspace_measures_the_rest(fleet: Fleet):
    low, high = (replace(ASKED, workspace_limit_bytes=size) for size in (1 << 20, 1 << 24))
    compile_plan(NETWORK, high)
    compile_plan(NETWORK, low)
    assert [task.workspace_limit_bytes for task in fleet.tasks] == [1 << 24]
    compile_plan(NETWORK, ASKED)
    assert [task.workspace_limit_bytes for task in fleet.tasks] == [1 << 24, MOST_WORKSPACE_BYTES]
    assert len(fleet.asked) == 2 * len(set(fleet.asked))


def test_nothing_is_measured_for_plans_that_cannot_fit(fleet: Fleet):
    for settings in ((("batch", "1e9"),), (("memory.device", "1 kB"),)):
        with pytest.raises(MbcError, match="'n' cannot fit ") as caught:
            compile_plan(NETWORK, replace(ASKED, settings=settings))
        assert caught.value.code == "MBC203" and not fleet.tasks


def test_always_measures_everything_again(fleet: Fleet):
    for _ in range(2):
        compile_plan(NETWORK, replace(ASKED, measure=Measure.ALWAYS, measure_for_s=300.0))
    assert [(task.again, task.measure_for_s) for task in fleet.tasks] == [(True, 300.0)] * 2
    assert fleet.tasks[0].needs == fleet.tasks[1].needs


@pytest.mark.parametrize(
    "options",
    [
        Options(gpu="h200"),
        replace(ASKED, measure=Measure.NEVER),
        replace(ASKED, gpu="t4"),
        replace(ASKED, settings=(("train.precision", "fp64"),)),
    ],
)
def test_what_is_not_measured(fleet: Fleet, options: Options):
    compile_plan(NETWORK, options)
    assert not fleet.tasks and not user_path(GPU.name).exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"gpu": "t4"}, "this machine has no such GPU"), ({"profile": "mine.sqlite"}, "a profile that was named")],
)
def test_a_demanded_but_impossible_measurement_is_reported(fleet: Fleet, options: dict[str, Any], reason: str):
    with pytest.raises(MbcError, match=reason) as caught:
        compile_plan(NETWORK, replace(ASKED, measure=Measure.ALWAYS, **options))
    assert caught.value.code == "MBC089" and caught.value.message.startswith("cannot measure for ")
    assert caught.value.remedy.startswith("leave out --measure always")
    assert not fleet.tasks


def test_a_named_profile_is_used_as_it_is(fleet: Fleet, tmp_path: Path):
    write_profile(profile({}), tmp_path / "p.sqlite")
    compile_plan(NETWORK, replace(ASKED, profile=str(tmp_path / "p.sqlite")))
    assert not fleet.tasks


@pytest.mark.parametrize("part", ["gpu", "pycuda", "nvcc"])
def test_nothing_happens_where_a_part_is_missing(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, part: str):
    if part == "gpu":
        fleet.gpus = ()
    if part == "pycuda":
        monkeypatch.setattr(measuring.importlib.util, "find_spec", lambda name: None)
    if part == "nvcc":
        monkeypatch.setattr(measuring, "find_toolchain", lambda: SimpleNamespace(nvcc=None))
    compile_plan(NETWORK, ASKED)
    assert not fleet.tasks
    assert not chosen([request()])


def test_the_shipped_profile_counts(fleet: Fleet):
    compile_plan(NETWORK, ASKED)
    own = user_path(GPU.name)
    write_profile(read_profile(own), paths.bundled_path(GPU.name))
    own.unlink()
    compile_plan(NETWORK, ASKED)
    assert len(fleet.tasks) == 1


def test_an_interrupt_is_reported_and_the_plan_is_made(fleet: Fleet):
    fleet.interrupt_after = 3
    said: list[str] = []
    with pytest.warns(RuntimeWarning, match=r"measuring was interrupted: \d+ operations are not measured") as caught:
        plan = compile_plan(NETWORK, ASKED, Stages(announce=said.append))
    assert plan.predictions.measured_share < 1
    assert len(caught) == 1
    assert any(text.startswith("measuring 2 of ") for text in said)
    fleet.interrupt_after = math.inf
    compile_plan(NETWORK, ASKED)
    first, second = ({signature(r) for need in task.needs for r in need.requests} for task in fleet.tasks)
    assert len(first) == len(second) + 3 and second < first


def test_outdated_requests_are_completed_once(fleet: Fleet):
    assert chosen([request(5)])
    decisions = Measuring(None, GPU, Rules(), ASKED)  # pyright: ignore[reportArgumentType]
    assert decisions.chosen([request(5)], [request(5), request(5)])
    assert fleet.asked == 2 * [signature(request(5))]
    assert [(task.again, task.outdated) for task in fleet.tasks] == [
        (False, frozenset()), (False, frozenset({signature(request(5))}))
    ]  # fmt: skip
    assert not decisions.chosen([], [request(5)]) and len(fleet.asked) == 2
    assert not Measuring(None, GPU, Rules(), replace(ASKED, measure=Measure.NEVER)).chosen([], [request(5)])  # pyright: ignore[reportArgumentType]


def test_single_requests_are_measured_once(fleet: Fleet):
    asked = [request(5), request(6), request(5)]
    assert chosen(asked)
    assert fleet.asked == [signature(request(5)), signature(request(6))]
    assert not chosen(asked)
    assert not chosen([])
    # Even where everything is measured again: planning and measuring in turn must come to an end.
    assert not chosen(asked, replace(ASKED, measure=Measure.ALWAYS))
    fleet.interrupt_after = 1
    with pytest.warns(RuntimeWarning, match="interrupted"):
        assert not chosen([request(7), request(9)])


def test_sizes_that_cannot_gain_are_not_missed():
    fast, slow = measurement(1, 8.0), measurement(1, 7.0)
    need = Need((request(8), request(4), request(2)), 1.0)
    limit = Extent(1 << 30)
    assert missing([need], None, 1) == (need,)
    measured = profile({request(8): [fast]}, {request(8): limit})
    assert missing([need], measured, 1) == (Need((request(4), request(2)), 1.0, whole=False),)
    # 4 rows take nearly as long as 8: no smaller size can be part of a better division.
    measured = profile({request(8): [fast], request(4): [slow]}, {request(8): limit, request(4): limit})
    assert missing([need], measured, 1) == ()
    measured = profile({request(8): [fast], request(4): [measurement(1, 2.0)]}, {request(8): limit, request(4): limit})
    assert missing([need], measured, 1) == (Need((request(2),), 1.0, whole=False),)
    assert missing([need], measured, 1 << 31) == (need,)


def test_a_size_measured_as_a_part_is_missing_as_a_whole():
    need = Need((request(4), request(2)), 1.0)
    measurements = {request(4): [measurement(1, 8.0)], request(2): [measurement(1, 4.0)]}
    parts = Extent(1 << 30, micro_batches_only=True)
    measured = profile(measurements, {request(4): parts, request(2): parts})
    assert missing([need], measured, 1) == (Need((request(4),), 1.0),)
    assert missing([Need(need.requests, 1.0, whole=False)], measured, 1) == ()


def test_texts():
    assert progress_text(Progress(3, 9, request(5), None)) == "measuring 3 of 9: convolution fp32 [5, 4, 8, 8] 3x3"
    assert progress_text(Progress(3, 9, request(5), 125.0)).startswith("measuring 3 of 9, 2 min 5 s left: ")
    decided = progress_text(Progress(3, 9, request(5), 20.0, Decision((), 24_120.0, 0.281)))
    assert decided.startswith("measuring 3 of 9, 20 s left (a step of 24.1 ms or more, 28% of it to be measured): conv")
    assert shortcomings(Outcome(Summary(measured=3), 0, False)) == ()
    over, failed, unsteady = shortcomings(Outcome(Summary(failures=("a: no\nmore", "b"), unsteady=("c",)), 2, False))
    assert over.startswith("the time for measuring is over: 2 operations")
    assert failed == "2 operations could not be measured; the first: a: no"
    assert "another process may be using the GPU" in unsteady
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        elsewhere = Measuring(None, find_spec("t4"), Rules(), ASKED)  # pyright: ignore[reportArgumentType]
        elsewhere.begin()
        assert not elsewhere.has_more
