"""mbc check: the whole command on the interpreter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mbc.cli import check_places
from mbc.codegen.build import Package
from mbc.codegen.toolchain import Missing
from mbc.equivalence import rule
from mbc.equivalence import run_step as step
from mbc.equivalence import step_variants as variants
from mbc.equivalence.run_step import Part
from mbc.hardware.target import LocalGpu
from mbc.runtime.cpu import Interpreter

CHECK = ("check", "tiny.mbc", "--gpu", "h200", "--device", "cpu", "--micro-batch", "2")


def test_a_divided_network_passes(mbc):
    done = mbc(*CHECK)
    assert done.code == 0 and done.err == ""
    assert done.out.startswith("tiny: batch 8, fp32, divided against undivided, on the CPU\n")
    assert re.search(r"^4 x 2 +3 +convolution, convolution_backward_filter$", done.out, re.MULTILINE)
    assert re.search(r"^conv0.weight +gradient +\S+e-\d+ .* ok$", done.out, re.MULTILINE)
    assert "the divided step computes what the undivided step does: 9 tensors within their limits" in done.out


def test_json_has_every_tensor(mbc):
    document = mbc(*CHECK, "--json").json
    assert (
        document["passed"]
        and document["reference"] == "float64"
        and document["device"] == "cpu"
        and document["divided"] == 3
    )
    parts = [tensor["part"] for tensor in document["tensors"]]
    assert sorted(parts) == ["gradient"] * 5 + ["loss", "output"] + ["statistic"] * 2
    assert all(0 <= tensor["distance"] < 1e-5 for tensor in document["tensors"])


@pytest.mark.parametrize(
    "setting",
    [
        "optimizer=sgd()",
        "optimizer=sgd(momentum=0.9, nesterov=true, weight_decay=0.5)",
        "optimizer=adamw(weight_decay=0.1)",
        'groups=group("*", rate=3, weight_decay=0.5)',
        "clip_norm=0.01",
    ],
)
def test_gradients_do_not_depend_on_the_optimizer(mbc, setting):
    plain = mbc(*CHECK, "--json").json["tensors"]
    assert mbc(*CHECK, "--json", "--set", f"train.{setting}").json["tensors"] == plain


def test_frozen_parameters_have_no_gradient_to_compare(mbc):
    document = mbc(*CHECK, "--json", "--set", 'train.frozen="*.bias"').json
    names = {tensor["name"] for tensor in document["tensors"] if tensor["part"] == "gradient"}
    assert document["passed"] and names and not any(name.endswith(".bias") for name in names)


def test_without_float64_the_step_is_held_against_itself(mbc, monkeypatch):
    done = mbc(*CHECK, "--reference", "perturbed")
    assert done.code == 0 and " perturbed  " in done.out and "float64" not in done.out
    monkeypatch.setattr(variants, "MOST_FLOAT64_PRODUCTS", 10)
    done = mbc(*CHECK)
    assert done.code == 0 and "float64 is skipped: the step is too large for NumPy" in done.out
    assert mbc(*CHECK, "--reference", "float64", "--json").json["reference"] == "float64"


def test_a_tolerance_that_is_broken_is_exit_code_1(mbc):
    done = mbc(*CHECK, "--tolerance", "0", "--set", "batch=64")
    assert done.code == 1 and "FAILS" in done.out and "tensors are not what the undivided step computes" in done.out
    assert mbc(*CHECK, "--tolerance", "1e-3").code == 0


def test_a_wrong_gradient_fails_whatever_is_drawn(mbc, monkeypatch):
    draws = []
    run_step = step.run_step

    def spoiled(subject, device, inputs, *rest):
        result = run_step(subject, device, inputs, *rest)
        if len(variants.divisions(subject)) and subject.graph.precision == "fp32":
            draws.append(subject)
            result.tensors[Part.GRADIENT, "conv0.weight"][...] *= 0.9
        return result

    monkeypatch.setattr(step, "run_step", spoiled)
    done = mbc(*CHECK)
    assert done.code == 1 and len(draws) == rule.DRAWS
    assert re.search(r"^conv0.weight +gradient .* FAILS$", done.out, re.MULTILINE)
    assert "1 of 9 tensors are not what the undivided step computes" in done.out


def test_only_the_worst_are_shown(mbc):
    done = mbc(*CHECK, "--limit", "2")
    assert "… and 7 tensors that are further from their limits" in done.out and done.out.count(" ok\n") == 2


def test_operations_one_by_one(mbc):
    done = mbc(*CHECK, "--operations")
    assert done.code == 0 and "all 2 distinct divided operations give the same result as undivided" in done.out
    assert re.search(r"^conv0.backward_filter +4 x 2 .* ok$", done.out, re.MULTILINE)
    document = mbc(*CHECK, "--operations", "--json").json
    assert [o["micro_batches"] for o in document["operations"]] == [[2, 2, 2, 2]] * 2
    assert {name for o in document["operations"] for name in o["names"]} == {
        "conv0", "infer.conv0", "conv0.backward_filter"
    }  # fmt: skip
    failed = mbc(*CHECK, "--operations", "--tolerance", "0", "--set", "batch=64")
    assert failed.code == 1 and "1 of 2 distinct divided operations give another result" in failed.out


@pytest.mark.parametrize("division", [("--policy", "undivided"), ("--micro-batch", "8")])
def test_nothing_to_compare_is_said_and_no_failure(mbc, division):
    done = mbc(*CHECK[:-2], *division)
    assert done.code == 0
    assert done.out.startswith("tiny: batch 8, fp32: no operation is divided, so there is nothing to compare (")
    assert mbc(*CHECK[:-2], *division, "--json").json["divided"] == 0


@pytest.mark.parametrize(
    ("rows", "size", "said", "remedy"),
    [
        ("9", "6", "--micro-batch 9 is more than the mini-batch of 8 rows", "give at most 8"),
        ("2", "7", "--micro-batch 2 cannot divide 'conv0'", "omit --micro-batch: no division of 8 rows meets this"),
    ],
)
def test_micro_batches_that_cannot_be_are_refused(mbc, rows, size, said, remedy):
    source = Path("tiny.mbc").read_text().replace("6, 6]", f"{size}, {size}]")
    Path("odd.mbc").write_text(source)
    for command in ("check", "show"):
        done = mbc(command, "odd.mbc", "--gpu", "h200", "--set", "train.precision=bf16", "--micro-batch", rows)
        assert done.code == 1 and f"error MBC205: {said}" in done.err and f"help: {remedy}" in done.err


def test_planning_a_plan_is_refused(mbc):
    assert mbc("compile", "tiny.mbc", "--gpu", "h200", "-o", "made").code == 0
    for place in ("made", "made/plan.json"):
        assert "error MBC188" in mbc("check", place).err


LAUNCHES = ("check", "tiny.mbc", "--gpu", "h200", "--device", "cpu", "--launches")


def test_every_launch_is_checked(mbc):
    done = mbc(*LAUNCHES, "--limit", "3")
    assert done.code == 0 and done.err == ""
    assert done.out.startswith("tiny: batch 8, fp32, launch by launch, on the CPU\n")
    assert re.search(r"^convolution +2 +0\.\d\d +\d\.\d +0 +ok$", done.out, re.MULTILINE)
    assert len(re.findall(r"^ *(?:train|infer) \d+ +", done.out, re.MULTILINE)) == 3
    assert "allowed: 8 roundoffs of an output in L2, 64 of an element, no wrong choice" in done.out
    assert re.search(
        r"^all \d+ launches give the result of NumPy in float64, in all [\d,]+ elements", done.out, re.MULTILINE
    )


def test_plans_and_packages_are_checked_as_they_are(mbc):
    document = mbc(*LAUNCHES, "--json", "--micro-batch", "2").json
    assert document["passed"] and document["device"] == "cpu" and document["reference"] == "NumPy in float64"
    assert mbc("compile", "tiny.mbc", "--gpu", "h200", "--micro-batch", "2", "-o", "made").code == 0
    for place in ("made", "made/plan.json"):
        again = mbc("check", place, "--launches", "--device", "cpu", "--json").json
        assert again["launches"] == document["launches"]
    slices = [launch["rows"] for launch in document["launches"] if launch["operations"] == "conv0"]
    assert slices == [[0, 2], [2, 4], [4, 6], [6, 8]]
    assert {output["passed"] for launch in document["launches"] for output in launch["outputs"]} == {True}
    done = mbc("check", "made", "--launches", "--set", "batch=4")
    assert done.code == 1 and "error MBC188: 'made' is planned already" in done.err


def test_a_wrong_launch_is_exit_code_1(mbc, monkeypatch):
    run_launch = Interpreter.run_launch

    def spoiled(self, program, index):
        run_launch(self, program, index)
        if (program, index) == ("infer", 1):
            self.arena[:] = self.arena[::-1].copy()

    monkeypatch.setattr(Interpreter, "run_launch", spoiled)
    done = mbc(*LAUNCHES, "--limit", "1")
    assert done.code == 1
    assert re.search(r"^infer 1 .* FAILS$", done.out, re.MULTILINE)
    assert re.search(r"^1 of \d+ launches do not give the result of NumPy in float64$", done.out, re.MULTILINE)


@pytest.mark.parametrize("rule", [("--reference", "float64"), ("--tolerance", "1"), ("--operations",)])
def test_rules_of_divided_steps_are_none_of_launches(mbc, capsys, rule):
    with pytest.raises(SystemExit) as caught:
        mbc(*LAUNCHES, *rule)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "not allowed with argument --launches" in said or "are rules for divided steps" in said


def test_a_gpu_that_is_not_here(mbc, monkeypatch):
    monkeypatch.setattr(check_places, "local_gpus", lambda: ())
    done = mbc(*CHECK[:-4], "--device", "cuda", "--micro-batch", "2")
    assert done.code == 1 and "error MBC199: there is no GPU here to compare on" in done.err


def test_fp64_is_not_compared_on_a_gpu(mbc, monkeypatch):
    monkeypatch.setattr(check_places, "local_gpus", lambda: (LocalGpu("NVIDIA H200", "580", "sm_90", 1, 1),))
    done = mbc(*CHECK[:-4], "--device", "cuda", "--micro-batch", "2", "--set", "train.precision=fp64")
    assert done.code == 1 and "error MBC199: fp64 runs on the CPU only" in done.err


def test_a_step_that_cannot_be_built(mbc, monkeypatch):
    gpu = LocalGpu("NVIDIA H200", "580", "sm_90", 1 << 37, 1 << 37)
    monkeypatch.setattr(check_places, "local_gpus", lambda: (gpu,))
    missing = Missing("cuDNN 9", "runs convolutions", "install it")
    monkeypatch.setattr(
        check_places, "build_package", lambda plan, folder, overwrite: Package(folder, None, (missing,))
    )
    done = mbc(*CHECK[:-4], "--micro-batch", "2")
    assert done.code == 1
    assert "error MBC199: the step cannot be built for the GPU: cuDNN 9 is missing" in done.err
