"""Notes on the GPU that plans are for: commands that only plan say which one, if the user or the machine did not."""

from __future__ import annotations

import warnings

import pytest

from mbc.cli.terminal import notes
from mbc.hardware import target
from mbc.hardware.target import LocalGpu
from mbc.options import Options

FP64 = ("--set", "train.precision=fp64")
DEFAULT = "note: this machine has no GPU that mbc can use: planned for NVIDIA H200; --gpu names another\n"
ON_CPU = "note: fp64 runs on the CPU only, so that --gpu has no effect on where it runs\n"
FEW = ("--without", "offload,recompute,concurrent_stream")
PLANNING = [
    ("compile", "tiny.mbc", "--force"), ("show", "tiny.mbc"), ("show", "tiny.mbc", "--roofline"),
    ("show", "tiny.mbc", "--ablation"), ("fit", "tiny.mbc", "--curve", "--points", "2"), ("report", "tiny.mbc"),
    ("trace", "tiny.mbc"), ("diff", "tiny.mbc", "tiny.mbc"),
    ("tune", "tiny.mbc", "--dry-run", "--noise-scale", "2", "--memory", "622MB"),
]  # fmt: skip


@pytest.fixture
def bare(mbc, monkeypatch):
    """Run commands on a machine without a GPU."""
    monkeypatch.setattr(target, "local_gpus", lambda: ())
    return mbc


@pytest.mark.parametrize("words", PLANNING, ids=" ".join)
def test_planning_for_the_default_gpu_says_so_once(bare, words):
    done = bare(*words, *FEW)
    assert done.code == 0 and done.err.count(DEFAULT) == 1, done.err
    assert "no GPU" not in bare(*words, *FEW, "--gpu", "h200").err


def test_the_gpu_of_this_machine_and_gpus_that_are_named_need_no_note(bare, monkeypatch):
    assert bare("show", "tiny.mbc", "--gpus", "2").err == DEFAULT
    assert "--gpus names another\n" in bare("show", "tiny.mbc", "--gpus", "h200,auto", *FEW).err
    assert "planned for NVIDIA H200@64; " in bare("show", "tiny.mbc", "--gpu", "auto@64").err
    here = LocalGpu("NVIDIA H200", "580", "sm_90", 1 << 37, 1 << 37)
    monkeypatch.setattr(target, "local_gpus", lambda: (here,))
    monkeypatch.setattr(target, "driver_cards", lambda: ())
    assert bare("show", "tiny.mbc").err == ""


def test_what_runs_on_the_cpu_names_no_gpu(bare, data):
    for words in (("train", "tiny.mbc", "--data", data, "--epochs", "1"), ("check", "tiny.mbc", "--micro-batch", "2")):
        assert "no GPU that" not in bare(*words).err
    assert not Options().explains_gpu, "from_torch says where it runs"


@pytest.mark.parametrize("words", [*PLANNING[:2], PLANNING[7]], ids=" ".join)
def test_a_gpu_has_no_effect_on_where_fp64_runs(bare, words):
    done = bare(*words, *FP64, "--gpu", "rtx-3060")
    assert done.code == 0 and done.err == ON_CPU
    assert "missing" not in done.out and "doctor" not in done.out
    assert bare(*words, *FP64).err == ""


def test_fit_says_before_its_search_that_fp64_runs_on_the_cpu(bare):
    done = bare("fit", "tiny.mbc", "--precision", "fp64", "--gpu", "rtx-3060", "--memory", "160kB", *FEW)
    assert done.code == 0 and done.err.startswith(f"{ON_CPU}batch 8: ") and done.err.count(ON_CPU) == 1
    assert done.out.startswith("tiny: fp64, for the CPU\n\n")


def test_nothing_is_missing_for_a_package_in_fp64(bare):
    assert bare("compile", "tiny.mbc", *FP64, "--json").json["missing"] == []


def test_a_note_is_printed_once_in_nested_bodies(capsys):
    with notes():
        for _ in range(2):
            with notes():
                warnings.warn("again", RuntimeWarning, stacklevel=1)
    with notes():
        warnings.warn("again", RuntimeWarning, stacklevel=1)
    assert capsys.readouterr().err == "note: again\n" * 2
