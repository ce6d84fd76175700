"""Rows of the step benchmarks from made-up plans and times, and deepbench's from a made-up profile."""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import deepbench
import deterministic
import micro_batches
import planning_time
import plans
import predictions
import stepping
from deepbench_layers import BATCH, LAYERS, Operation
from micro_batches import CASES, DIVIDED, LEGACY, PLANS, UNDIVIDED, UNLIMITED_MIB, Variant, rows_of, variants
from modules import Job, example
from plans import Planned, make_plan, step_digest

from mbc.ir.types import Layout, Precision
from mbc.kernels.cudnn_legacy import MATHS
from mbc.options import Policy
from mbc.plan.summary import OperationSummary
from mbc.profile.model import Identity, Measurement, Profile, signature

FIRST = (Layout.CHANNELS_FIRST,) * 3
MIB = 1 << 20


def operation(name: str, time_us: float, rows: tuple[int, ...] = (256,)) -> OperationSummary:
    return OperationSummary(name, "convolution", ("k",), False, rows, (), time_us, False, 0, 0, 0, (0, 1))


def asked(**more: Any) -> argparse.Namespace:
    told = {"only": ["alexnet"], "precisions": "fp32", "limits": "64,512", "gpu": "h200", "profile": None}
    return argparse.Namespace(**{**told, **more})


def made(variant: Variant) -> Planned:
    """Legacy 20 ms, undivided 15, divided 10 at 64 MiB; everything 9 without a limit or under a large one."""
    if variant.limit_mib != 64:
        return Planned("free", 9.0, (operation("conv1", 9000.0),))
    time_ms = {LEGACY: 20.0, UNDIVIDED: 15.0, DIVIDED: 10.0}[variant.plan]
    rows = (128, 128) if variant.plan == DIVIDED else (256,)
    return Planned(variant.plan, time_ms, (operation("conv1", time_ms * 1e3, rows),))


def test_rows_of_steps() -> None:
    planned = {v: made(v) for v in variants(asked())}
    times = {LEGACY: 16.0, UNDIVIDED: 12.0, DIVIDED: 10.0, "free": 9.0}
    timed = {step: {"step_ms": ms, "spread_ms": 0.1} for step, ms in times.items()}
    small, large = rows_of(planned, timed)
    assert (small["limit_mib"], small["legacy_ms"], small["divided_ms"]) == (64, 16.0, 10.0)
    assert small["over_legacy"] == pytest.approx(1.6) and small["over_legacy_predicted"] == pytest.approx(2.0)
    assert small["divided_operations"] == 1
    # 1.6 is less than the 1.7 asked: what bounds it is told. No limit at all gives 9 ms of 20.
    assert small["over_legacy_reached"] is False
    bound = small["over_legacy_bounded_by"]
    assert bound["most_possible"] == pytest.approx(20 / 9) and bound["convolutions_ms"] == pytest.approx(10)
    assert bound["operations"][0]["unlimited_us"] == 9000.0 and bound["operations"][0]["micro_batches"] == [128, 128]
    assert large["over_legacy"] == large["over_undivided"] == 1.0 and "over_legacy_reached" not in large


def test_rows_tell_what_failed_and_predict_without_a_gpu() -> None:
    planned = {v: made(v) for v in variants(asked())}
    broken = next(v for v in planned if v.plan == LEGACY and v.limit_mib == 64)
    planned[broken] = Planned("", 0.0, (), "MbcError: no kernel")
    row = rows_of(planned, {})[0]
    assert row["legacy_failed"] == "MbcError: no kernel" and row["over_legacy"] is None
    assert row["over_undivided"] is None and row["over_undivided_predicted"] == pytest.approx(1.5)
    assert row["over_undivided_reached"] is True


def test_variants_are_all_plans_of_all_limits() -> None:
    found = variants(asked(only=[], precisions="fp32,tf32", limits="8,16"))
    assert len(found) == len({v.name for v in found}) == 3 * (2 * 2 * 3 + 2)
    assert {v.limit_mib for v in found if v.case.name == "vgg16"} == {512, UNLIMITED_MIB}
    divided = next(v for v in found if v.plan == DIVIDED and v.limit_mib == 8).job("h200", "p.sqlite")
    assert divided.options.policy is Policy.ALL and divided.options.workspace_limit_bytes == 8 * MIB
    assert divided.options.profile == "p.sqlite" and divided.gpu == "h200"
    assert PLANS == (LEGACY, UNDIVIDED, DIVIDED)


def test_every_asked_gain_is_of_a_case() -> None:
    known = {(case.name, precision) for case in CASES for precision in case.precisions}
    assert {key[:2] for key in micro_batches.ASKED} <= known


def small(name: str = "alexnet", **options: Any) -> Job:
    job = example(name, ("batch", "8"), ("size", "64"), ("width", "8"), ("classes", "10"))
    return Job(job.name, job.source, job.settings, job.network, "h200").with_options(**options)


def test_equal_steps_have_one_digest(tmp_path: Path) -> None:
    first = make_plan(small(policy=Policy.UNDIVIDED), tmp_path)
    again = make_plan(small(policy=Policy.UNDIVIDED, workspace_limit_bytes=1 << 40), tmp_path)
    cut = make_plan(small(policy=Policy.UNDIVIDED, micro_batch=4), tmp_path)
    assert not (first.failed or again.failed or cut.failed)
    assert first.step == again.step != cut.step
    assert cut.divided > 0 and first.divided == 0
    assert {p.name for p in tmp_path.iterdir()} == {f"{first.step}.json", f"{cut.step}.json"}
    other = small(policy=Policy.UNDIVIDED).with_settings(("batch", "16"))
    assert step_digest(other.plan()) != first.step


def test_a_plan_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    assert "MBC203" in make_plan(small().with_settings(("memory.device", "1 kB")), tmp_path).failed
    assert not list(tmp_path.iterdir())


def test_a_package_that_ends_the_process_does_not_take_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "child.py"
    script.write_text(
        "import json, os, sys\n"
        "folders, steps, *_ = json.loads(sys.stdin.read())\n"
        "for name in folders:\n"
        "    if name == 'bad':\n"
        "        os._exit(7)\n"
        "    print(json.dumps({'name': name, 'step_ms': 1.0, 'steps': steps}), flush=True)\n"
    )
    monkeypatch.setattr(stepping, "__file__", str(script))
    found = stepping.time_packages({name: Path(name) for name in ("a", "bad", "b")}, 3)
    assert found["a"] == found["b"] == {"step_ms": 1.0, "steps": 3}
    assert found["bad"] == {"failed": "the process ended with 7"}


def test_a_package_that_hangs_ends_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, hanging = tmp_path / "child.py", tmp_path / "hanging"
    script.write_text(
        "import json, pathlib, sys, time\n"
        "for name in json.loads(sys.stdin.read())[0]:\n"
        "    if name == 'hangs':\n"
        f"        pathlib.Path({str(hanging)!r}).touch()\n"
        "        time.sleep(3600)\n"
        "    print(json.dumps({'name': name, 'step_ms': 1.0}), flush=True)\n"
    )
    now_s = [100.0]

    class Timer(threading.Timer):
        """Time is over as soon as the child hangs, however long that took."""

        def run(self) -> None:
            assert self.interval == 2.0
            while not hanging.exists():
                time.sleep(0.01)
            now_s[0] += self.interval
            self.function()

    monkeypatch.setattr(stepping, "__file__", str(script))
    monkeypatch.setattr(stepping, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(stepping, "threading", SimpleNamespace(Timer=Timer))
    found = stepping.time_packages({name: Path(name) for name in ("a", "hangs", "b")}, 3, timeout_s=2.0)
    assert found["a"] == {"step_ms": 1.0} and found["hangs"] == {"failed": "not done in 2 s"}
    assert found["b"] == {"failed": "not reached in the time allowed"}


def test_steps_are_built_once_and_failures_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_pool", lambda workers: _Here())
    monkeypatch.setattr(plans, "build_plan", lambda path: "no compiler" if path.stem == "b" else "")
    asked_for: list[list[str]] = []

    def time_packages(folders: dict[str, Path], steps: int, digest_after: int) -> dict[str, dict[str, Any]]:
        asked_for.append(list(folders))
        return {name: {"step_ms": 1.0} for name in folders}

    monkeypatch.setattr(plans, "time_packages", time_packages)
    first, second = plans.run_steps(["a", "b", "a", ""], tmp_path, 1, 5, runs=2)
    assert asked_for == [["a"], ["a"]] and first == second
    assert first == {"a": {"step_ms": 1.0}, "b": {"failed": "no compiler"}}


class _Here:
    """A pool that works at once, in this process."""

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Any, *arguments: Any) -> Any:
        result = work(*arguments)
        return type("Done", (), {"result": lambda self: result})()


def test_predictions_are_held_to_the_length_of_the_step() -> None:
    arena = {"arena_predicted": 10, "arena_taken": 10}
    plan = Planned("s", 9.4, ())
    assert predictions.row_of("n", plan, {"step_ms": 10.0, **arena})["passed"] is False
    assert predictions.row_of("n", plan, {"step_ms": 9.8, **arena})["passed"] is True
    assert predictions.row_of("n", Planned("s", 0.92, ()), {"step_ms": 1.0, **arena})["passed"] is True
    assert predictions.row_of("n", plan, {"step_ms": 9.4, "arena_predicted": 10, "arena_taken": 11})["passed"] is False
    assert predictions.row_of("n", Planned("", 0.0, (), "no memory"), {})["failed"] == "no memory"


def test_determinism_compares_all_runs() -> None:
    runs = [
        {"free": {"step_ms": 1.0, "states": str(k)}, "fixed": {"step_ms": 1.2 + k, "states": "same"}} for k in range(3)
    ]
    row = deterministic.row_of("n", "fp32", Planned("free", 1.0, ()), Planned("fixed", 1.1, ()), runs)
    assert row["deterministic_equal"] is True and row["free_equal"] is False and row["same_plan"] is False
    assert row["price"] == pytest.approx(1.2) and row["price_predicted"] == pytest.approx(1.1)
    broken = deterministic.row_of("n", "fp32", Planned("free", 1.0, ()), Planned("", 0.0, (), "no kernel"), runs)
    assert broken["failed"] == "no kernel" and broken["price"] is None


def test_menus_of_the_planning_benchmark_are_whole_fronts() -> None:
    found = planning_time.menus_here()
    assert found["menu_points"] > 10 and found["menu_of_sums_points"] > 10


def measured(workspace: int, time_us: float, provider: str = "cudnn_legacy", algorithm: int = 0) -> Measurement:
    if provider == "cudnn":
        settings = (("engine", algorithm), ("layout", 0))
    else:
        settings = (("algorithm", algorithm), ("layout", 0), ("math", MATHS["FMA"]))
    return Measurement(provider, "convolution", settings, FIRST, workspace, time_us, 0.0, True, False, (), 0.0)


def profile_of(wanted: Operation, found: dict[int, list[Measurement]]) -> Profile:
    by_key = {signature(wanted.request(rows)): tuple(of) for rows, of in found.items()}
    return Profile(Identity("gpu", "sm_90", 1, "1", 91900, "2026-01-01"), by_key)


def test_deepbench_rows_and_means() -> None:
    wanted = Operation(LAYERS[0], "F", Precision.FP32)
    profile = profile_of(
        wanted,
        {
            BATCH: [measured(0, 100.0), measured(300 * MIB, 20.0, algorithm=5), measured(0, 60.0, "cudnn", 1)],
            64: [measured(0, 30.0), measured(60 * MIB, 8.0, algorithm=5)],
        },
    )
    ran: list[float] = []

    def run(operation: Operation, best: Any, whole: Any) -> dict[str, Any]:
        ran.append(best.time_us)
        return {"run_over_predicted": 1.01, "within": True, "distance": 1e-7}

    rows = deepbench.rows_of(profile, wanted, run)
    by_key = {(r["candidates"], r["limit_mib"]): r for r in rows}
    assert len(rows) == 8 and all(r["is_brute_force"] for r in rows)
    legacy = by_key["legacy", 64]
    assert (legacy["undivided_us"], legacy["divided_us"]) == (100.0, 32.0)
    assert legacy["divided"] == ["4 x 64 rows: cudnn_legacy algorithm=5 layout=0 math=3"]
    assert by_key["all", 64]["speed_up"] == pytest.approx(60 / 32)
    assert by_key["all", 512]["speed_up"] == 1.0 and "within" not in by_key["all", 512]
    assert ran == [32.0, 32.0]  # the same choice under three limits is run once for each set
    means = {(m["suite"], m["candidates"], m["limit_mib"]): m for m in deepbench.summary(rows)}
    assert means["together", "legacy", 64]["mean_speed_up"] == pytest.approx(100 / 32)
    assert means["together", "legacy", 64]["within"] == means["together", "legacy", 64]["ran"] == 1
    assert ("deepbench", "legacy", 64) not in means


def test_deepbench_where_only_a_division_fits() -> None:
    wanted = Operation(LAYERS[0], "F", Precision.FP32)
    profile = profile_of(wanted, {BATCH: [measured(300 * MIB, 20.0)], 64: [measured(60 * MIB, 8.0)]})
    row = deepbench.rows_of(profile, wanted, None)[0]
    assert (row["undivided_us"], row["divided_us"], row["speed_up"]) == (None, 32.0, None)
    assert deepbench.summary([row]) == []
    nothing = profile_of(wanted, {BATCH: [measured(600 * MIB, 20.0)]})
    row = deepbench.rows_of(nothing, wanted, None)[-1]
    assert row["divided"] is None and row["brute_force_us"] is None and row["is_brute_force"]
    assert deepbench.rows_of(profile_of(wanted, {}), wanted, None) == []


def test_deepbench_needs_are_those_of_the_profile() -> None:
    found = deepbench.needs([Operation(LAYERS[0], "W", Precision.TF32)])
    assert [r.inputs[0].shape[0] for r in found[0].requests] == [256 >> k for k in range(9)]
    assert math.isfinite(found[0].weight_us) and found[0].weight_us > 0


def test_deepbench_writes_one_file_a_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import record

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    wanted = Operation(LAYERS[0], "F", Precision.FP32)
    other = Operation(LAYERS[1], "F", Precision.FP32)
    profile = profile_of(wanted, {BATCH: [measured(0, 100.0)], 64: [measured(0, 20.0)]})
    deepbench.finish(profile, [wanted, other], None, {"requests_left": 3})
    found = json.loads((tmp_path / "deepbench_fp32.json").read_text())
    assert found["not_measured"] == [other.name] and found["requests_left"] == 3
    assert found["profile"]["gpu"] == "gpu" and len(found["rows"]) == 8
