"""mbc bench."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mbc.bench import job as jobs
from mbc.bench import race as racing
from mbc.bench.job import MBC, Result
from mbc.cli import bench_command
from mbc.profile.edit import write_profile
from mbc.provenance import digests
from tests.profile.profiles import measurement, profile, request

QUICK = ("--device", "cpu", "--blocks", "2", "--block", "0s")
OURS = Result(losses=(1.0, 0.9, 0.8, 0.7), step_ms=2.0, spread_ms=0.1, steps=2, first_step_s=0.5, peak_bytes=1 << 20)

CONVOLUTION = """
network one(batch = 8) {
  input image[batch, 4, 8, 8] : float
  input target[batch, 4, 8, 8] : float
  y = image |> conv(4, 3, pad=1)
  output y
  loss (y, target) |> mse
}
"""


@pytest.fixture
def results(monkeypatch):
    """What each contender answers, by its peer; nothing is run."""
    answers = {
        MBC: OURS,
        "torch": Result(**{**as_fields(OURS), "step_ms": 5.0}),
        "jax": Result(problem="jax is not installed"),
    }
    monkeypatch.setattr(jobs, "missing", lambda peers: ())
    monkeypatch.setattr(racing, "run_apart", lambda job, contender, timeout_s: answers[contender.peer])
    return answers


def as_fields(result: Result):
    return {name: getattr(result, name) for name in Result.__slots__}


def test_a_table_and_a_file(mbc, results):
    done = mbc("bench", "tiny.mbc", "--against", "torch,jax", *QUICK, "-o", "out.json")
    assert done.code == 0, done.err
    assert "against torch: 2.50x as fast as its best setting (eager, channels first)" in done.out
    assert "against jax: nothing to compare with" in done.out and "jax is not installed" in done.out
    written = json.loads(Path("out.json").read_text())
    assert written["best"]["torch"] == {"variant": "eager, channels first", "ratio": 2.5}
    assert written["best"]["jax"] is None and written["same_mathematics"] is True
    assert written["mbc"]["losses"] == [1.0, 0.9, 0.8, 0.7]
    assert written["code"] == digests() and set(digests()) == {"kernels", "planner"}
    again = mbc("bench", "tiny.mbc", "--against", "torch,jax", *QUICK, "--json").json
    changing = {"plan_s", "date"}
    assert {k: v for k, v in again.items() if k not in changing} == {
        k: v for k, v in written.items() if k not in changing
    }


def test_the_floor_is_of_the_profile_that_planning_uses(mbc, results, monkeypatch):
    monkeypatch.setattr(bench_command, "_on_gpu", lambda device, planned: True)
    monkeypatch.setattr(bench_command, "_package", lambda planned, folder, on_gpu: folder)
    times_us = {"convolution": 0.25, "convolution_backward_filter": 0.5}
    known = profile(
        {request(kind=kind): [replace(measurement(1, time_us), name=kind)] for kind, time_us in times_us.items()}
    )
    write_profile(known, Path("own.sqlite"))
    Path("one.mbc").write_text(CONVOLUTION)
    done = mbc("bench", "one.mbc", "--gpu", "h200", "--against", "torch", *QUICK, "--profile", "own.sqlite", "--json")
    assert done.code == 0, done.err
    floor = done.json["floor"]
    assert (floor["products"], floor["estimated"], floor["products_us"]) == (2, 0, sum(times_us.values()))


def test_another_mathematics_fails(mbc, results):
    results["torch"] = Result(**{**as_fields(OURS), "losses": (1.0, 0.8, 0.7, 0.6)})
    done = mbc("bench", "tiny.mbc", "--against", "torch", *QUICK)
    assert done.code == 1
    assert "NOT THE SAME" in done.out and "against torch: nothing to compare with" in done.out


def test_for_real(mbc, monkeypatch):
    monkeypatch.setattr(jobs, "missing", lambda peers: ())
    done = mbc("bench", "tiny.mbc", "--against", "torch", *QUICK, "--json")
    assert done.code == 0, done.err
    (entry,) = done.json["contenders"]
    assert done.json["settings"] == {}
    assert entry["same"] and done.json["mbc"]["steps"] == 4
    assert "torch is not installed" in entry["problem"] or entry["apart"] < 1e-5


def test_a_result_that_is_there_stays_until_there_is_a_better_one(mbc, results, tmp_path):
    here = tmp_path / "there.json"
    here.write_text("kept")
    results[MBC] = Result(problem="died with 1: out of memory")
    for path in (here, tmp_path / "new.json"):
        assert mbc("bench", "tiny.mbc", "--against", "torch", *QUICK, "-o", str(path)).code == 1
    assert here.read_text() == "kept"
    assert not (tmp_path / "new.json").exists()


def test_refusals(mbc, results):
    assert mbc("compile", "tiny.mbc", "--set", "train.precision=fp64").code == 0
    for arguments, said in (
        (("tiny", "--device", "cpu"), "MBC188: 'tiny' is planned already"),
        (("tiny.mbc", "--device", "cuda"), "MBC221: there is no GPU here to time on"),
        (("tiny.mbc", *QUICK, "-o", "./tiny.mbc"), "MBC222: cannot write 'tiny.mbc': it is the source"),
        (("tiny.mbc", *QUICK, "-o", "no/where.json"), "MBC222: cannot write 'no/where.json': No such file"),
    ):
        done = mbc("bench", *arguments)
        assert done.code == 1 and f"error {said}" in done.err, done.err
    for wrong in (("--against", "tensorflow"), ("--blocks", "1")):
        with pytest.raises(SystemExit):
            mbc("bench", "tiny.mbc", *wrong)


def test_our_own_failure(mbc, results):
    results[MBC] = Result(problem="died with 1: out of memory")
    done = mbc("bench", "tiny.mbc", "--against", "torch", *QUICK)
    assert done.code == 1 and "out of memory" in done.err
    assert "error MBC220: mbc's own step cannot be timed: " in done.err


def test_peers_that_are_not_installed_are_named_before_anything_is_planned(mbc, results, monkeypatch):
    def unplanned(*_):
        raise AssertionError("planned")

    monkeypatch.setattr(jobs, "missing", lambda peers: ("jax",) if "jax" in peers else ())
    done = mbc("bench", "tiny.mbc", "--against", "torch,jax", *QUICK)
    assert done.code == 0 and "note: jax is not installed here: jax will not run" in done.err
    monkeypatch.setattr(bench_command, "plan_source", unplanned)
    monkeypatch.setattr(jobs, "missing", lambda peers: ("jax", "torch"))
    done = mbc("bench", "tiny.mbc", *QUICK)
    assert done.code == 1
    assert "error MBC223: there is nobody to compare with: jax and torch are not installed here" in done.err


def test_what_is_missing():
    assert jobs.missing(()) == ()
    assert set(jobs.missing(("torch", "torch.compile", "jax"))) <= {"torch", "jax"}


def test_without_a_gpu_it_says_so_first(mbc, results, monkeypatch):
    monkeypatch.setattr(bench_command, "current_gpu", lambda: None)
    quick = ("--blocks", "2", "--block", "0s", "--against", "torch")
    done = mbc("bench", "tiny.mbc", *quick)
    assert done.code == 0 and "note: there is no GPU here: everybody is timed on the CPU" in done.err
    assert "note: there is no GPU" not in mbc("bench", "tiny.mbc", *quick, "--device", "cpu").err
