"""mbc fit."""

from __future__ import annotations

import signal
import time
from functools import partial
from typing import NoReturn

import pytest

from mbc.cli import fit_command
from mbc.fit import own_batch

H200 = ("--gpu", "h200")
# Most time of planning within a budget goes to offloading and recomputing; batches and budgets are tried alike
# without.
FEW = (*H200, "--without", "offload,recompute,concurrent_stream")


@pytest.mark.parametrize("gpu", [FEW, pytest.param(H200, marks=pytest.mark.exhaustive)], ids=["few", "all"])
def test_the_largest_batch_is_one_that_compiles_and_the_next_is_not(mbc, gpu):
    """Ask for the exact largest batch by --search-for; without it the search ends earlier."""
    figures = mbc("show", "tiny.mbc", *gpu, "--set", "batch=50", "--json").json
    budget = figures["predictions"]["arena_bytes"] + figures["predictions"]["overhead_bytes"]
    done = mbc("fit", "tiny.mbc", *gpu, "--memory", f"{budget}B", "--json", "--search-for", "1h")
    assert done.code == 0, done.err
    largest = done.json["largest"]["batch"]
    assert done.json["finished"] and done.json["smallest_refused"] == largest + 1
    assert largest >= 50 and done.json["largest"]["needed_bytes"] <= budget
    device = ("--set", f"memory.device={budget}B")
    assert mbc("show", "tiny.mbc", *gpu, *device, "--set", f"batch={largest}").code == 0
    over = mbc("show", "tiny.mbc", *gpu, *device, "--set", f"batch={largest + 1}")
    assert over.code == 1 and "error MBC20" in over.err
    refused = [p for p in done.json["probes"] if not p["fits"]]
    assert min(p["batch"] for p in refused) == largest + 1
    assert all(p["code"].startswith("MBC20") and p["needed_bytes"] > budget for p in refused)


def test_the_largest_batch_that_two_gpus_share(mbc):
    two = (*FEW, "--gpus", "2")
    predictions = mbc("show", "tiny.mbc", *two, "--set", "batch=50", "--json").json["predictions"]
    budget = predictions["arena_bytes"] + predictions["overhead_bytes"]
    done = mbc("fit", "tiny.mbc", *two, "--memory", f"{budget}B", "--json")
    assert done.code == 0, done.err
    assert done.json["largest"]["batch"] >= 50
    assert all(probe["batch"] % 2 == 0 for probe in done.json["probes"])
    shown = mbc("fit", "tiny.mbc", *two, "--memory", f"{budget}B").out
    assert shown.startswith("tiny: mini-batches shared by 2 GPUs, fp32, for NVIDIA H200 (sm_90)\n")


def test_the_table(mbc):
    figures = mbc("show", "tiny.mbc", *FEW, "--json").json["predictions"]
    budget = figures["arena_bytes"] + figures["overhead_bytes"]
    words = ("fit", "tiny.mbc", *FEW, "--memory", f"{budget}B", "--precision", "bf16")
    shown = mbc(*words).out
    assert shown.startswith("tiny: bf16, for NVIDIA H200 (sm_90)\n\nbatch ")
    about = {"network": "tiny", "precision": "bf16", "gpu": "NVIDIA H200", "architecture": "sm_90"}
    assert about.items() <= mbc(*words, "--json").json.items()
    for word in (
        "images/s",
        "over its bound",
        "largest batch in",
        "MBC204: the smallest plan found takes",
        "does not prove that no plan fits",
        "█",
    ):
        assert word in shown


def test_the_curve_over_the_budget(mbc):
    done = mbc("fit", "tiny.mbc", *FEW, "--curve", "--points", "3", "--set", "batch=64", "--json")
    assert done.code == 0, done.err
    probes, unlimited = done.json["probes"], done.json["unlimited"]
    assert [p["budget_bytes"] for p in probes][::2] == [unlimited["floor_bytes"], unlimited["needed_bytes"]]
    # Waits between streams depend on addresses, which differ from budget to budget: it may be faster.
    assert probes[-1]["fits"] and probes[-1]["train_us"] <= unlimited["train_us"]
    shown = mbc("fit", "tiny.mbc", *FEW, "--curve", "--points", "2").out
    assert "over no limit" in shown and shown.startswith("tiny: fp32, for NVIDIA H200 (sm_90)\n\n")


def test_the_plan_without_a_limit_is_called_so(mbc, monkeypatch):
    titles: list[str] = []
    plan = fit_command._plan
    monkeypatch.setattr(fit_command, "_plan", lambda s, o, title, at: titles.append(title) or plan(s, o, title, at))
    assert mbc("fit", "tiny.mbc", *FEW, "--curve", "--points", "2").code == 0
    assert titles[0] == "without a limit" and all(title.startswith("within ") for title in titles[1:])
    assert max(map(len, titles)) < 20, titles


def test_refusals(mbc):
    from pathlib import Path

    done = mbc("fit", "tiny.mbc", *H200, "--memory", "1MB")
    assert done.code == 1 and "error MBC194: nothing fits, not even a batch of 1: 'tiny' cannot fit" in done.err
    assert "help: raise --memory above " in done.err
    needed = mbc("show", "tiny.mbc", *H200, "--set", "batch=1", "--json").json
    bytes_ = needed["predictions"]["overhead_bytes"] + needed["bounds"]["floor_bytes"] - 1
    least = mbc("fit", "tiny.mbc", *H200, "--memory", f"{bytes_}B")
    assert "help: give --set train.precision=bf16, or raise --memory " in least.err
    assert done.err.count("batch ") == 3, "8, of the network; then 1, since the context alone takes more; and the error"
    Path("rows.mbc").write_text(Path("tiny.mbc").read_text().replace("batch", "rows"))
    done = mbc("fit", "rows.mbc", *H200)
    assert done.code == 1 and "error MBC195: `tiny` has no parameter `batch`" in done.err
    assert mbc("compile", "tiny.mbc", *H200).code == 0
    assert "error MBC188" in mbc("fit", "tiny", *H200).err


def interrupt() -> NoReturn:
    """Raise KeyboardInterrupt, which works even in a background job of a shell, where Ctrl-C is ignored."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("stop", [interrupt, partial(signal.raise_signal, signal.SIGTERM)], ids=["Ctrl-C", "SIGTERM"])
def test_rows_as_they_come_and_the_rest_after_an_interrupt(mbc, monkeypatch, stop):
    from mbc import compiler

    done = mbc("fit", "tiny.mbc", *H200, "--curve", "--points", "2")
    assert done.err.count("within ") == 2 and " images/s, takes " in done.err
    plan, calls = compiler.try_plan, []

    def stopped(source, options, stages):
        calls.append(options)
        if len(calls) > 3:
            stop()
        return plan(source, options, stages)

    monkeypatch.setattr(compiler, "try_plan", stopped)
    done = mbc("fit", "tiny.mbc", *H200, "--memory", "1GB")
    assert done.code == 0 and "the search was stopped before its end" in done.err
    assert [f"batch {batch}: " in done.err for batch in (8, 16, 32, 64)] == [True, True, True, False]
    assert "largest batch in 1 GB (953.7 MiB) so far: 32, " in done.out and "larger batches were not tried" in done.out
    calls.clear()
    done = mbc("fit", "tiny.mbc", *H200, "--memory", "1GB", "--json")
    assert done.code == 0 and done.json["finished"] is False and len(done.json["probes"]) == 3


def test_the_time_to_search_ends_a_plan(mbc, monkeypatch):
    """Print the batches so far when the time is over; with none that fits, raise an error."""
    from mbc import compiler

    plan, slow_from = compiler.try_plan, 32

    def slow(source, options, stages):
        if own_batch(source, options) >= slow_from:
            time.sleep(60)
        return plan(source, options, stages)

    monkeypatch.setattr(compiler, "try_plan", slow)
    done = mbc("fit", "tiny.mbc", *H200, "--memory", "1GB", "--search-for", "10s", "--json")
    assert done.code == 0 and "the search was stopped before its end" in done.err
    assert not done.json["finished"] and done.json["largest"]["batch"] == 16
    slow_from = 1
    done = mbc("fit", "tiny.mbc", *H200, "--memory", "1GB", "--search-for", "1s")
    assert done.code == 1 and "MBC329: the time of --search-for is over, and no batch" in done.err
