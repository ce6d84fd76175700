"""Networks that cannot be planned as asked: the messages on the command line."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from mbc import constraints
from mbc.hardware import target
from mbc.hardware.card_file import sheet_of
from mbc.hardware.target import LocalGpu
from mbc.kernels.providers import PROVIDERS
from mbc.optimize.search.overhead import UNMEASURED_BYTES
from mbc.units import parse_size, show_enough, show_size

H200 = ("--gpu", "h200")
WIDE = """
network wide(batch = 8, classes = 3) {
  input image[batch, 256] : float
  input target[batch] : class
  logits = image |> linear(4096) |> relu |> linear(4096) |> relu |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
"""
ROOT = Path(__file__).resolve().parents[2]
PROVIDER_NAMES = {provider.name for provider in PROVIDERS}


def refused(mbc, *arguments):
    done = mbc("show", "tiny.mbc", *arguments)
    assert done.code == 1 and done.out == ""
    return done.err


def most_rows(error):
    """Return the upper bound of the batch that the remedy of MBC203 names."""
    named = re.search(r"lower the batch \(`mbc fit` finds the largest that fits, at most (\d+)\)", error)
    assert named is not None, error
    return int(named[1])


def test_unknown_gpu(mbc):
    error = refused(mbc, "--gpu", "h2000")
    assert error.startswith("error MBC070: unknown GPU 'h2000'\nhelp: did you mean h200? Else choose one")
    for name in ("nothing-like-it", "RTX 1080", ""):  # not rtx-5080
        error = refused(mbc, "--gpu", name)
        assert f"unknown GPU '{name}'\nhelp: choose one that `mbc gpus` lists (compute capability 7.5" in error
        assert "and some older ones for plans only), or describe the card in a file: --gpu card.json" in error


def test_unknown_gpu_of_this_machine(mbc, monkeypatch):
    monkeypatch.setattr(target, "local_gpus", lambda: (LocalGpu("NVIDIA Z1", "999", "sm_990", 1 << 34, 1 << 34),))
    error = refused(mbc)
    assert (
        "error MBC071: the GPU of this machine, NVIDIA Z1, has an architecture on which mbc has no data (sm_990)"
        in error
    )
    assert "choose a GPU of an older architecture with --gpu" in error


def test_no_kernel(mbc, monkeypatch):
    monkeypatch.setattr(constraints, "PROVIDERS", ())
    error = refused(mbc, *H200)
    assert "error MBC200: no kernel can run '" in error and " in fp32\n" in error
    assert "tiny.mbc:" in error and "^" in error


def test_a_provider_that_lacks_kernels_names_one_that_has_them(mbc):
    error = refused(mbc, *H200, "--provider", "cublaslt")
    assert "error MBC200: no kernel among cublaslt can run '" in error
    remedy = error.split("help: add a provider that can: ")[1].split()
    assert remedy[:3] == ["--provider", "cublaslt", "--provider"] and remedy[3] in PROVIDER_NAMES
    assert "error MBC200" not in mbc("show", "tiny.mbc", *H200, *remedy).err


def test_workspace_limit_too_small(mbc):
    large = ("--set", "batch=4096")  # whose statistics are summed in parts
    error = refused(mbc, *H200, *large, "--workspace-limit", "1B")
    assert "error MBC201: '" in error and "but the limit is 1 B; no kernel with less is allowed by" in error
    assert "help: raise --workspace-limit to at least " in error
    least = error.split("to at least ")[1].strip()
    assert "MBC201" not in mbc("show", "tiny.mbc", *H200, *large, "--workspace-limit", least).err


def test_no_deterministic_kernel(mbc, monkeypatch):
    class Unsteady:
        """A provider whose kernels are all fast and not deterministic."""

        def __init__(self, provider):
            self.name = provider.name
            self._provider = provider

        def candidates(self, request, device):
            return [dataclasses.replace(c, deterministic=False) for c in self._provider.candidates(request, device)]

    monkeypatch.setattr(constraints, "PROVIDERS", tuple(map(Unsteady, PROVIDERS)))
    error = refused(mbc, *H200, "--set", "train.deterministic=true")
    assert "error MBC202: '" in error and "has no deterministic kernel\n" in error
    assert "set deterministic = false" in error


def test_a_budget_below_the_overhead(mbc):
    figures = mbc("show", "tiny.mbc", *H200, "--json").json
    overhead, floor = figures["predictions"]["overhead_bytes"], figures["bounds"]["floor_bytes"]
    error = refused(mbc, *H200, "--set", "memory.device=300MiB")
    reserved = f"{show_size(overhead)} are reserved for the GPU's context and libraries, before any tensor"
    assert f"error MBC203: 'tiny' cannot fit 300.0 MiB: {reserved}\n" in error
    assert (
        f"help: raise memory.device above {show_enough(overhead + floor)}, a lower bound: most plans take more" in error
    )
    assert "set by" not in error and "tiny.mbc:" not in error, "no operation is to blame"


def test_a_budget_below_the_floor(mbc):
    figures = mbc("show", "tiny.mbc", *H200, "--json").json
    overhead, floor = figures["predictions"]["overhead_bytes"], figures["bounds"]["floor_bytes"]
    set_by = figures["bounds"]["floor_operation"]
    error = refused(mbc, *H200, "--set", f"memory.device={overhead + floor - 1}B")
    # Rounded they are the same.
    size = show_size(overhead + floor)
    assert (
        f"error MBC203: 'tiny' cannot fit {size} ({overhead + floor - 1} B): the lower bound of all plans is " in error
    )
    assert f"the lower bound of all plans is {size} ({overhead + floor} B), set by '{set_by}' (" in error
    assert f"): {show_size(floor)} of its operands, its workspace and the states" in error
    assert f"and {show_size(overhead)} reserved for the GPU's context and libraries" in error
    assert (
        f", or raise memory.device above {show_enough(overhead + floor)}, a lower bound: most plans take more" in error
    )
    enough = re.search(r"; a plan that saves no memory fits (\S+)", error)
    assert enough is not None
    assert mbc("show", "tiny.mbc", *H200, "--set", f"memory.device={enough[1]}", "--json").code == 0


@pytest.mark.parametrize("gpu", ["h200", "t4"])
def test_the_size_that_saves_no_memory_is_at_most_that_of_a_plan_without_a_limit(mbc, gpu):
    network = (str(ROOT / "examples" / "alexnet.mbc"), "--gpu", gpu)
    free = mbc("show", *network, "--set", "memory.device=1TB", "--json").json["predictions"]
    enough = re.search(
        r"; a plan that saves no memory fits (\S+)", mbc("show", *network, "--set", "memory.device=1MB").err
    )
    assert enough is not None
    assert parse_size(enough[1]) <= parse_size(show_enough(free["arena_bytes"] + free["overhead_bytes"]))
    assert mbc("show", *network, "--set", f"memory.device={enough[1]}").code == 0


def test_remedies_lower_the_bound_of_a_budget(mbc):
    def bound(*settings):
        return mbc("show", "tiny.mbc", *H200, "--set", "batch=4096", *settings, "--json").json["bounds"]["floor_bytes"]

    overhead = mbc("show", "tiny.mbc", *H200, "--json").json["predictions"]["overhead_bytes"]
    floor = bound()
    device = ("--set", f"memory.device={overhead + floor // 3}B")
    error = refused(mbc, *H200, "--set", "batch=4096", *device)
    helps, half = (
        error.split("help: ")[1],
        ", set train.precision to {} (activations take half of their bytes), or raise ",
    )
    assert helps.startswith("lower the batch (`mbc fit` finds") and half.format("bf16") in helps
    batch = most_rows(helps)
    # To within what alignment takes.
    assert bound("--set", f"batch={batch}") - 2048 <= floor // 3 < bound("--set", f"batch={batch + 1}")
    turing = ("--gpu", "t4", "--set", f"memory.device={UNMEASURED_BYTES + floor // 3}B")  # without bf16
    assert half.format("fp16") in refused(mbc, *turing, "--set", "batch=4096")
    narrow = ("--set", "train.precision=bf16", "--set", f"memory.device={overhead + floor // 8}B")
    assert "train.precision" not in refused(mbc, *H200, "--set", "batch=4096", *narrow).split("help: ")[1]


def test_half_precision_is_no_remedy_where_parameters_take_the_memory(mbc):
    Path("wide.mbc").write_text(WIDE)
    kept = (*H200, "--without", "offload")
    figures = mbc("show", "wide.mbc", *kept, "--json").json
    overhead, floor = figures["predictions"]["overhead_bytes"], figures["bounds"]["floor_bytes"]
    parameters, rows = 4096 * 4096 * 4, 2 * 4096 * 4 + 4096 // 8  # of the second layer; with a mask of a bit
    for lacking, helps in ((8 * rows // 2, True), (4 * 8 * rows, False), (parameters, False)):
        error = mbc("show", "wide.mbc", *kept, "--set", f"memory.device={overhead + floor - lacking}B").err
        assert "error MBC203" in error and ("train.precision to bf16" in error) == helps
    error = mbc("fit", "wide.mbc", *kept, "--memory", f"{overhead + floor - parameters}B").err
    assert "error MBC194" in error and "train.precision" not in error.split("help: ")[1]


def test_states_that_may_not_be_in_host_memory(mbc):
    Path("tiny.mbc").write_text(Path("tiny.mbc").read_text().replace("linear(classes) @head", "linear(400000) @head"))
    floor, overhead = (
        mbc("show", "tiny.mbc", *H200, "--json").json[part][name]
        for part, name in (("bounds", "floor_bytes"), ("predictions", "overhead_bytes"))
    )
    tight = ("--set", f"memory.device={overhead + floor}B")
    error = refused(mbc, *H200, *tight, "--set", "memory.host=0B")
    assert "of the optimizer's states be in host memory (memory.host, offload)" in error and "MBC203" in error


def test_a_plan_for_the_cpu_reserves_nothing_for_a_gpu(mbc):
    figures = mbc(
        "show", "tiny.mbc", *H200, "--set", "train.precision=fp64", "--set", "memory.device=1MB", "--json"
    ).json
    assert figures["predictions"]["overhead_bytes"] == 0


def test_a_budget_that_no_plan_was_found_for(mbc):
    figures = mbc("show", "tiny.mbc", *H200, "--json").json
    overhead = figures["predictions"]["overhead_bytes"]
    floor, arena = figures["bounds"]["floor_bytes"], figures["predictions"]["arena_bytes"]
    assert floor < arena
    kept = ("--without", "offload,recompute")
    error = refused(mbc, *H200, *kept, "--set", f"memory.device={overhead + floor + 3 * (arena - floor) // 10}B")
    assert f"error MBC204: the smallest plan found for 'tiny' takes {show_size(overhead + arena)} (" in error
    assert ": its arena " in error and f" KiB, and {show_size(overhead)} outside it; the budget is " in error
    batches = r"help: lower the batch \(`mbc fit` finds the largest that fits, about [1-7]\)"
    assert re.search(batches + ", set train.precision to bf16 (.*), or raise memory.device to ", error), error
    enough = error.split("raise memory.device to ")[1].split(";")[0].strip()
    assert mbc("show", "tiny.mbc", *H200, *kept, "--set", f"memory.device={enough}").code == 0


@pytest.mark.parametrize(
    ("network", "share", "without", "qualifier", "error"),
    [
        ("tiny.mbc", 0.5, "offload,recompute", "about", 0.15),
        ("wide.mbc", 0.2, "offload,recompute", "about", 0.25),  # a smaller batch has a leaner plan
        ("tiny.mbc", 0.2, "concurrent_stream", "at most about", 0.15),
    ],
)
def test_the_batch_that_probably_fits_is_near_the_largest_that_does(mbc, network, share, without, qualifier, error):
    Path("wide.mbc").write_text(WIDE.replace("4096", "16384"))
    large = (*H200, "--set", "batch=4096", "--without", without)
    figures = mbc("show", network, *large, "--json").json
    floor, arena = figures["bounds"]["floor_bytes"], figures["predictions"]["arena_bytes"]
    available = floor + int(share * (arena - floor))
    tight = ("--set", f"memory.device={figures['predictions']['overhead_bytes'] + available}B")
    refusal = mbc("show", network, *large, *tight).err
    named = re.search(rf"error MBC204: (?s:.*)finds the largest that fits, {qualifier} (\d+)\)", refusal)
    assert named is not None, refusal
    fit = mbc("fit", network, *large, *tight, "--json").json
    print(named[1], fit["largest"]["batch"])
    assert int(named[1]) == pytest.approx(fit["largest"]["batch"], rel=error)


def test_the_batch_of_several_gpus_counts_the_rows_of_all(mbc):
    overhead = mbc("show", "tiny.mbc", *H200, "--gpus", "2", "--json").json["predictions"]["overhead_bytes"]
    tight = ("--gpus", "2", "--set", f"memory.device={overhead + 2_000_000}B")
    rows = most_rows(refused(mbc, *H200, *tight, "--set", "batch=16384"))
    assert rows > 2 and rows % 2 == 0
    assert f"at most {rows})" in refused(mbc, *H200, *tight, "--set", f"batch={rows + 2}"), "no larger batch may fit"
    assert "MBC203" not in refused(mbc, *H200, *tight, "--set", f"batch={rows - 200}", "--without", "offload")


@pytest.mark.parametrize("host", ["0 B", "1 kB"])
def test_a_host_limit_that_makes_offloading_impossible_is_planned_without(mbc, host):
    figures = mbc("show", "tiny.mbc", *H200, "--set", "batch=1024", "--json").json
    arena, overhead = (figures["predictions"][name] for name in ("arena_bytes", "overhead_bytes"))
    tight = ("--set", "batch=1024", "--set", f"memory.device={overhead + 17 * arena // 20}B")
    free = mbc("show", "tiny.mbc", *H200, *tight, "--without", "recompute", "--json").json
    assert free["predictions"]["host_bytes"] > 1000  # offloading is what would be done
    done = mbc("show", "tiny.mbc", *H200, *tight, "--set", f"memory.host={host}", "--json")
    assert done.code == 0, done.err
    assert done.json["predictions"]["host_bytes"] == 0


def test_settings_that_make_no_sense(mbc):
    error = refused(mbc, *H200, "--set", "memory.device=-1GB")
    assert "error MBC026: `memory.device` is negative, but must be positive" in error
    assert "but must be 0 B or more" in refused(mbc, *H200, "--set", "memory.host=-1GB")
    error = refused(mbc, *H200, "--set", "batch=abc")
    assert "error MBC005: the name `abc` is not known here" in error
    assert "help: `batch` takes a number (or an expression of numbers): write --set batch=8" in error


def test_a_budget_above_the_gpus_memory_is_reported(mbc):
    has = show_size(mbc("gpus", "--json").json["known"]["t4"]["memory_bytes"])
    large = ("--set", "memory.device=500GB")
    done = mbc("show", "tiny.mbc", "--gpu", "t4", *large)
    assert done.code == 0
    assert f"note: memory.device = 500 GB (465.7 GiB) is more than the {has} of the Tesla T4: a plan" in done.err
    assert "more than" not in mbc("show", "tiny.mbc", "--gpu", "t4", *large, "--set", "train.precision=fp64").err


def test_a_plan_that_leaves_other_programs_no_room_is_reported(mbc, monkeypatch):
    card = mbc("gpus", "t4", "--json").json | {"name": "Small", "memory_gb": 1.8}
    Path("card.json").write_text(json.dumps(card))
    small = ("--gpu", "card.json", "--set", "batch=150000")
    done = mbc("show", "tiny.mbc", *small, "--json")
    predicted, budget = done.json["predictions"], done.json["budget_bytes"]
    # The reserve for context and libraries is a part of the default budget.
    assert predicted["overhead_bytes"] < predicted["arena_bytes"] + predicted["overhead_bytes"] <= budget
    assert 0.9 * 1.8 * 2**30 < budget < 1.8 * 2**30, "the driver and error correction take the rest"
    note = "the budget is all memory of the "
    assert f"note: {note}Small, and the plan leaves less than 1 GB of it to a display and other programs: " in done.err
    recommended = done.err.split(": memory.device=")[1].split()[0]
    assert 10**9 <= budget - parse_size(recommended) < 1.2 * 10**9
    assert note not in mbc("show", "tiny.mbc", *small, "--set", "memory.device=1GB").err
    assert note not in mbc("show", "tiny.mbc", "--gpu", "t4").err, "much is left"
    assert note not in mbc("show", "tiny.mbc", *small, "--set", "train.precision=fp64").err, "it is for the CPU"
    Path("tiny_card.json").write_text(json.dumps(card | {"memory_gb": 1.2}))
    done = mbc("show", "tiny.mbc", "--gpu", "tiny_card.json")
    assert "1 GB of it to a display and other programs\n" in done.err, "what is left is less than the reserve"
    here = LocalGpu("Small", "580.1", "sm_75", 2 << 30, 2 << 30, card=sheet_of(card))
    monkeypatch.setattr(target, "local_gpus", lambda: (here,))
    assert note not in mbc("show", "tiny.mbc", *small[2:]).err, "the driver says what is free"


def test_a_batch_that_can_never_fit_is_refused_by_its_shapes(mbc, monkeypatch):
    monkeypatch.setattr("mbc.optimize.selection.selector.choose", None)  # nothing is chosen
    for batch in (10**9, 10**9 + 1, 2**30):
        error = refused(mbc, *H200, "--set", f"batch={batch}")
        assert "error MBC203: 'tiny' cannot fit 139.8 GiB: the lower bound of all plans is " in error
        assert most_rows(error) < batch


def test_inputs_that_do_not_fit_are_refused_before_anything_is_chosen(mbc, monkeypatch):
    pointwise = (
        "network points(batch = 4) { input x[batch, 64, 8, 8] : float input t[batch] : class "
        "y = x |> conv(4, 1) |> relu |> global_avgpool |> linear(3) output y loss (y, t) |> softmax_cross_entropy }"
    )
    Path("tiny.mbc").write_text(pointwise)
    monkeypatch.setattr("mbc.optimize.selection.selector.choose", None)
    error = refused(mbc, *H200, "--set", "batch=1e8")
    assert "error MBC203: 'points' cannot fit 139.8 GiB: the lower bound of all plans is " in error
    assert " of states and inputs when a step starts, and " in error
    rows = most_rows(error)
    assert "MBC203" in refused(mbc, *H200, "--set", f"batch={rows + 1}"), "the batch that is named is the largest"


def test_a_file_with_a_similar_name_is_suggested(mbc):
    error = mbc("show", "tinny.mbc").err
    assert "error MBC183: cannot read 'tinny.mbc'" in error and "did you mean 'tiny.mbc'? Else give a source" in error
    assert "did you mean" not in mbc("show", "nowhere/near.mbc").err
