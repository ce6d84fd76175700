"""mbc bench."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mbc.bench import contender_messages as jobs
from mbc.bench import race as racing
from mbc.bench.contender_messages import MBC, Result
from mbc.cli import bench_command
from mbc.hardware.target import LocalGpu
from mbc.profile.edit import write_profile
from mbc.provenance import digests
from tests.profile.profiles import measurement, profile, request
from tests.ranks.test_mpi import AS_ROOT, with_mpi

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
    """Replace the runs of the contenders by fixed results, one for each framework."""
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
    assert written["code"] == digests()
    again = mbc("bench", "tiny.mbc", "--against", "torch,jax", *QUICK, "--json").json
    changing = {"plan_s", "date"}
    assert {k: v for k, v in again.items() if k not in changing} == {
        k: v for k, v in written.items() if k not in changing
    }


def test_the_floor_is_of_the_profile_that_planning_uses(mbc, results, monkeypatch):
    monkeypatch.setattr(bench_command, "_on_gpu", lambda device, planned: True)
    monkeypatch.setattr(bench_command, "_package", lambda planned, folder, on_gpu: folder)
    times_us = {"convolution": 0.25, "convolution_backward_filter": 0.5}
    own = profile(
        {request(kind=kind): [replace(measurement(1, time_us), name=kind)] for kind, time_us in times_us.items()}
    )
    write_profile(own, Path("own.sqlite"))
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
        (
            ("tiny.mbc", *QUICK, "-o", "./tiny.mbc"),
            "MBC370: -o 'tiny.mbc' has the suffix of a source, which it could replace",
        ),
        (("tiny.mbc", *QUICK, "-o", "no/where.json"), "MBC222: cannot write 'no/where.json': No such file"),
    ):
        done = mbc("bench", *arguments)
        assert done.code == 1 and f"error {said}" in done.err, done.err
    for wrong in (("--against", "tensorflow"), ("--blocks", "1")):
        with pytest.raises(SystemExit):
            mbc("bench", "tiny.mbc", *wrong)


def test_peers_take_no_images_of_bytes(mbc, results):
    text = CONVOLUTION.replace("image[batch, 4, 8, 8] : float", "photo[batch, 4, 8, 8] : uint8")
    Path("bytes.mbc").write_text(text.replace("y = image |>", "y = photo |> augment(flip=true) |>"))
    done = mbc("bench", "bytes.mbc", *QUICK)
    assert done.code == 1 and "error MBC243: input 'photo' has bytes: `augment` would draw" in done.err


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
    assert "error MBC223: there is no peer to compare with: jax and torch are not installed here" in done.err


def test_what_is_missing():
    assert jobs.missing(()) == ()
    assert set(jobs.missing(("torch", "torch.compile", "jax"))) <= {"torch", "jax"}


def test_without_a_gpu_it_says_so_first(mbc, results, monkeypatch):
    monkeypatch.setattr(bench_command, "current_gpu", lambda: None)
    quick = ("--blocks", "2", "--block", "0s", "--against", "torch")
    done = mbc("bench", "tiny.mbc", *quick)
    assert done.code == 0 and "note: there is no GPU here: all contenders run on the CPU" in done.err
    assert "note: there is no GPU" not in mbc("bench", "tiny.mbc", *quick, "--device", "cpu").err


@pytest.fixture
def shared(monkeypatch, results):
    """Replace the runs on several GPUs by the results on one; mbc on one GPU alone takes 1.9 ms for its rows."""
    monkeypatch.setattr(racing, "run_ranks", lambda job, contender, gpus, timeout_s: results[contender.peer])
    monkeypatch.setattr(
        racing,
        "run_alone",
        lambda job, contender, gpus, timeout_s: Result(**{**as_fields(OURS), "step_ms": 1.9, "each_ms": (1.8, 1.9)}),
    )
    return results


def test_on_several_gpus(mbc, shared):
    shared["torch"] = Result(**{**as_fields(OURS), "step_ms": 3.8, "stage": "captured, not compiled"})
    two = ("bench", "tiny.mbc", "--gpus", "2", *QUICK)
    done = mbc(*two, "--against", "torch,jax")
    assert done.code == 0, done.err
    assert "note: only torch is timed on 2 GPUs" in done.err
    assert "batch 8, fp32, 2 GPUs" in done.out and "efficiency" in done.out
    assert "the slowest GPU with its rows alone (mbc: 1.8 ms, 1.9 ms), over that of 2 with all rows" in done.out
    rows = {line.split()[0]: line for line in done.out.splitlines() if line}
    assert "1.9 ms" in rows["mbc"] and "95.0%" in rows["mbc"] and "4,000" in rows["mbc"]
    assert "50.0%" in rows["torch"] and "1.90x" in rows["torch"]
    document = mbc(*two, "--against", "torch", "--json").json
    assert document["gpus"] == 2 and document["batch"] == 8 and document["mbc"]["efficiency"] == pytest.approx(0.95)
    assert [c["efficiency"] for c in document["contenders"]] == [pytest.approx(0.5)] * len(document["contenders"])
    assert document["contenders"][0]["alone"]["step_ms"] == 1.9 and document["contenders"][0]["stage"]
    assert "alone" not in mbc("bench", "tiny.mbc", "--against", "torch", *QUICK, "--json").json["mbc"]


def test_refusals_on_several_gpus(mbc, shared, monkeypatch):
    for arguments, said in (
        (("--gpus", "3"), "MBC276: 8 rows cannot be divided equally between 3 GPUs"),
        (("--gpus", "2", "--against", "jax"), "MBC278: jax is timed on one GPU only"),
    ):
        done = mbc("bench", "tiny.mbc", *QUICK, *arguments)
        assert done.code == 1 and f"error {said}" in done.err, done.err
    here = LocalGpu("NVIDIA H200", "570", "sm_90", 1, 1)
    monkeypatch.setattr(bench_command, "current_gpu", lambda: here)
    monkeypatch.setattr(bench_command, "local_gpus", lambda: (here,))
    done = mbc("bench", "tiny.mbc", "--gpus", "2", "--against", "torch")
    assert done.code == 1 and "error MBC277: this machine has 1 GPU, not 2" in done.err


class TestWithMpi:
    pytestmark = with_mpi

    @pytest.mark.exhaustive
    def test_two_ranks_on_the_cpu(self, mbc, monkeypatch):
        pytest.importorskip("torch")
        for name, value in AS_ROOT.items():
            monkeypatch.setenv(name, value)
        done = mbc("bench", "tiny.mbc", "--gpus", "2", "--against", "torch", "--gpu", "h200", *QUICK, "--json")
        assert done.code == 0, done.err
        document = done.json
        assert document["same_mathematics"] and document["best"]["torch"]["ratio"] > 0
        for one in (document["mbc"], *document["contenders"]):
            assert one["problem"] == "" and len(one["each_ms"]) == len(one["alone"]["each_ms"]) == 2
            assert one["efficiency"] > 0
