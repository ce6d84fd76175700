"""mbc nnunet plan."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mbc import compiler
from mbc.cli import nnunet_command
from mbc.units import show_size

CASES = Path(__file__).resolve().parents[1] / "cases" / "nnunet"
FEW = ("--gpu", "h200", "--without", "offload,recompute,concurrent_stream")
PLAN = ("nnunet", "plan", "plans.json", *FEW)


@pytest.fixture
def plans(mbc):
    """Write plans of two small networks, and the data set beside them."""
    document = json.loads((CASES / "nnUNetResEncUNetLPlans.json").read_text())
    for entries in document["configurations"].values():
        axes = len(entries["patch_size"])
        entries |= {"batch_size": 2, "patch_size": [16] * axes, "median_image_size_in_voxels": [23.5] * axes}
        network = entries["architecture"]["arch_kwargs"]
        network |= {"n_stages": 3, "features_per_stage": [4, 4, 8], "n_blocks_per_stage": [1, 2, 1]}
        network |= {key: network[key][:3] for key in ("kernel_sizes", "strides")} | {"n_conv_per_stage_decoder": [1, 1]}
    Path("plans.json").write_text(json.dumps(document))
    shutil.copy(CASES / "dataset.json", "dataset.json")
    return mbc


def test_configurations_within_a_budget_and_the_least_that_trains(plans):
    done = plans(*PLAN, "--memory", "2GB", "--json")
    assert done.code == 0, done.err
    assert [row["configuration"]["name"] for row in done.json["rows"]] == ["2d", "3d_fullres"]
    for row in done.json["rows"]:
        figures, least = row["figures"], row["least"]
        assert row["fits"] and figures["train_low_us"] <= figures["train_us"] <= figures["train_high_us"]
        assert row["epoch_s"] == pytest.approx(250 * figures["train_us"] / 1e6)
        assert figures["floor_bytes"] <= least["needed_bytes"] <= least["budget_bytes"] <= figures["needed_bytes"]
        assert f", trains from {show_size(least['budget_bytes'])}\n" in done.err, "before the table"
        within = plans(*PLAN, "--memory", f"{least['budget_bytes']}B", "--quick", "--json")
        assert within.json["rows"][done.json["rows"].index(row)]["fits"]
    table = plans(*PLAN, "--memory", "2GB", "--quick", "--configuration", "2d").out
    assert "2 x 16x16" in table and "3d_fullres" not in table and "an epoch is 250 steps" in table


def test_a_note_names_the_default_gpu_once(plans, monkeypatch):
    monkeypatch.setattr("mbc.hardware.target.local_gpus", lambda: ())
    done = plans(*PLAN[:3], *FEW[2:], "--memory", "2GB", "--quick")
    assert done.code == 0 and done.err.count("note: this machine has no GPU that mbc can use: planned for NVIDIA") == 1


@pytest.mark.parametrize("largest", ["batch", "patch"])
def test_the_largest_batch_and_patch(plans, largest):
    words = (*PLAN, "--configuration", "3d_fullres", "--quick", "--json")
    small = plans(*words).json["rows"][0]["figures"]["needed_bytes"]
    (row,) = plans(*words, "--memory", f"{small + (3 << 20)}B", "--largest", largest).json["rows"]
    batch, patch = row["largest"]["batch"], row["largest"]["patch"]
    assert row["largest"]["needed_bytes"] <= small + (3 << 20)
    if largest == "batch":
        assert batch > 2 and patch == [16] * 3
    else:
        assert batch == 2 and sum(patch) > 48 and all(size % 4 == 0 and size <= 24 for size in patch)
    assert f"largest {batch} x" in plans(*words[:-1], "--memory", f"{small + (3 << 20)}B", "--largest", largest).out


def test_a_budget_that_nothing_fits_and_files_that_do_not_help(plans):
    done = plans(*PLAN, "--memory", "100MB", "--configuration", "2d")
    assert done.code == 1 and "no " in done.out
    assert "MBC395: no configuration trains within 100 MB (95.4 MiB) on" in done.err
    assert "help: raise --memory to " in done.err and ", in which '2d' trains" in done.err
    done = plans(*PLAN, "--configuration", "3d")
    assert "MBC393: no plans file has a configuration '3d'" in done.err and "choose one of 2d, 3d_full" in done.err
    Path("dataset.json").write_text("{}")
    assert "MBC394: 'dataset.json' is no dataset.json of nnU-Net 2" in plans(*PLAN).err
    Path("dataset.json").unlink()
    assert "MBC394: 'plans.json' does not say how many channels and classes" in plans(*PLAN).err
    done = plans(*PLAN, "--quick", "--channels", "4", "--classes", "7", "--json")
    assert done.code == 0 and len(done.json["rows"]) == 2


def test_configurations_so_far_after_an_interrupt(plans, monkeypatch):
    calls = []

    def stopped(source, options, stages):
        calls.append(options)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return compiler.compile_plan(source, options, stages)

    monkeypatch.setattr(nnunet_command, "compile_plan", stopped)
    done = plans(*PLAN, "--quick", "--json")
    assert done.code == 130 and len(done.json["rows"]) == 1 and not done.json["finished"]
