"""mbc show and mbc diff."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mbc.cli import main
from mbc.plan.file import load_plan
from mbc.plan.group import launch_name
from tests.report.pages import data_of

FP64 = ("--set", "train.precision=fp64")


@pytest.fixture
def package(mbc):
    assert mbc("compile", "tiny.mbc", *FP64).code == 0
    return "tiny"


@pytest.fixture
def gpu_package(mbc):
    assert mbc("compile", "tiny.mbc", "--gpu", "h200", "-o", "tiny").code == 0
    return "tiny"


def test_show_is_the_same_of_package_plan_and_source(mbc, package):
    shown = [mbc("show", package), mbc("show", "tiny/plan.json"), mbc("show", "tiny.mbc", *FP64)]
    assert [s.code for s in shown] == [0, 0, 0], shown[0].err
    assert shown[0].out == shown[1].out == shown[2].out
    for word in ("conv0", "head", "at the peak", "bound", "lifetime", "workspace", "arena", "of it states"):
        assert word in shown[0].out


def test_show_less(mbc):
    whole, limited, by_kind, infer = (
        mbc("show", "tiny.mbc", "--gpu", "h200", *how).out
        for how in ((), ("--limit", "2"), ("--by-kind",), ("--infer",))
    )
    assert len(limited.splitlines()) < len(whole.splitlines())
    assert "faster operations" in limited
    assert any(line.startswith("kind ") and "share" in line for line in by_kind.splitlines())
    assert infer.startswith("tiny: inference")


TIME = re.compile(r"\d (us|ms|s)\b|/s\b")


def test_plans_in_fp64_are_for_the_cpu_and_have_no_times(mbc, package):
    assert all(TIME.search(mbc("show", "tiny.mbc", "--gpu", "h200", *how).out) for how in ((), ("--by-kind",)))
    small = ("tiny.mbc", *FP64, "--set", "memory.device=160kB", "--set", "batch=64")  # divides operations
    for how in ((package,), (package, "--by-kind"), (package, "--infer", "--limit", "2"), small):
        shown = mbc("show", *how).out
        assert "\nfor the CPU\n" in shown and not TIME.search(shown) and "NVIDIA" not in shown, shown
    shown = mbc("show", "tiny.mbc", *FP64, "--ablation").out
    assert "images/s" in shown and not TIME.search(shown.replace("images/s", "")), shown
    predictions = mbc("show", package, "--json").json["predictions"]
    assert predictions["arena_bytes"] > 0 and not predictions["train_us"] and not predictions["infer_high_us"]
    shown = mbc("fit", "tiny.mbc", *FP64, "--memory", "160kB")
    assert ", for the CPU, takes " in shown.out and not TIME.search(shown.out + shown.err), shown
    both = mbc("diff", "tiny.mbc", *FP64, "--gpu", "h200", "--gpu", "t4").out
    assert "by time: h200 and t4 are in fp64, which is for the CPU." in both and not TIME.search(both)
    one = mbc("diff", package, "tiny.mbc", "--gpu", "h200").out
    assert re.search(r"^training step +- +~", one, re.MULTILINE)
    assert mbc("report", package, "-o", "page.html").code == mbc("diff", package, "tiny.mbc", "-o", "b.html").code == 0
    needing = {
        ("fit", "--curve"): "a curve of step times", ("tune", "--dry-run"): "choosing a batch by speed",
        ("trace",): "a trace",
    }  # fmt: skip
    for command, purpose in needing.items():
        refused = mbc(command[0], "tiny.mbc", *command[1:], *FP64)
        said = f"error MBC196: 'tiny' is in fp64, which is for the CPU: {purpose} needs predicted times"
        assert refused.code == 1 and said in refused.err


def test_show_the_roofline(mbc, package):
    shown = mbc("show", "tiny.mbc", "--gpu", "h200", "--roofline", "--limit", "3")
    assert shown.code == 0, shown.err
    assert "speed of light" in shown.out and "floor of the network" in shown.out
    assert "floor of the network" not in mbc("show", "tiny.mbc", "--gpu", "h200", "--roofline", "--infer").out
    document = mbc("show", "tiny.mbc", "--gpu", "h200", "--roofline", "--json").json
    assert document["floor"]["products"] == 5 and document["operations"][0]["name"] == "conv0"
    refused = mbc("show", package, "--roofline")
    assert refused.code == 1 and "is in fp64, which is for the CPU: a roofline needs predicted times" in refused.err


def test_show_as_json(mbc, package):
    shown = mbc("show", package, "--json").json
    assert shown["network"] == "tiny" and shown["batch"] == 8
    assert shown["predictions"]["arena_bytes"] > 0
    assert shown["train"]["operations"][0]["name"] == "conv0"


@pytest.fixture
def elsewhere(monkeypatch):
    """Return a command line that runs mbc in a process of its own, outside the checkout."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    return [sys.executable, "-m", "mbc.cli"]


def test_show_to_a_pipe_that_closes(package, elsewhere):
    show = subprocess.Popen([*elsewhere, "show", package, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert show.stdout is not None and show.stderr is not None
    show.stdout.readline()
    show.stdout.close()
    assert show.stderr.read() == b""
    show.stderr.close()
    assert show.wait() == 0


def test_show_where_the_terminal_is_ascii(package, elsewhere, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = subprocess.run([*elsewhere, "show", package], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_diff_of_two_plans(mbc, package):
    assert mbc("compile", "tiny.mbc", *FP64, "--set", "batch=16", "-o", "larger").code == 0
    done = mbc("diff", package, "larger/plan.json")
    assert done.code == 0, done.err
    assert "arena" in done.out and "larger/plan.json" in done.out and "%" in done.out
    assert "run the same" in mbc("diff", package, package).out
    assert mbc("diff", package, package, "--json").json["same"] is True
    assert "arena_bytes" in mbc("diff", package, "larger", "--json").json["totals"]


def test_diff_of_a_source_for_two_gpus(mbc):
    done = mbc("diff", "tiny.mbc", "--gpu", "h200", "--gpu", "t4")
    assert done.code == 0, done.err
    assert "h200" in done.out and "t4" in done.out
    assert not Path("tiny").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny.mbc",), "cannot compare 1 plan: diff takes two"),
        (("tiny.mbc", "--gpu", "h200"), "cannot compare 1 plan with --gpu h200: diff takes two"),
        (("tiny.mbc", "tiny.mbc", "tiny.mbc"), "cannot compare 3 plans: diff takes two"),
        (("tiny.mbc", *("--gpu", "t4") * 3), "cannot compare 1 plan with --gpu t4 --gpu t4 --gpu t4: diff takes two"),
        (("tiny.mbc", "--gpus", "2"), "cannot compare 1 plan with --gpus 2: diff takes two"),
        (("tiny.mbc", "--gpus", "h200,h200"), "cannot compare 1 plan with --gpus h200,h200: diff takes two"),
    ],
)
def test_diff_of_incomparable_files(mbc, arguments, message):
    done = mbc("diff", *arguments)
    assert done.code == 1
    assert f"error MBC186: {message}\nhelp: name two plans" in done.err


def test_diff_does_not_plan_a_package(mbc, package):
    done = mbc("diff", package, "--gpu", "h200", "--gpu", "t4")
    assert done.code == 1 and f"error MBC188: '{package}' is planned already" in done.err


def test_diff_of_a_source_for_two_numbers_of_gpus(mbc):
    done = mbc("diff", "tiny.mbc", "--gpu", "h200", "--gpus", "1", "--gpus", "2")
    assert done.code == 0, done.err
    heads = done.out.splitlines()[0].split("  ")
    assert [head.strip() for head in heads if head] == ["in all", "1 GPU", "2 GPUs", "change"]
    assert "all-reduce bytes" in done.out and "all-reduce alone" in done.out


def test_both_gpus_are_checked_before_planning(mbc, monkeypatch):
    monkeypatch.setattr("mbc.cli.diff_command.plans_of_ranks", lambda *_: pytest.fail("planned"))
    done = mbc("diff", "tiny.mbc", "--gpu", "h200", "--gpu", "h20")
    assert done.code == 1 and "unknown GPU 'h20'" in done.err and "did you mean h200? Else" in done.err


def test_unknown_gpu(mbc, capsys):
    done = mbc("show", "tiny.mbc", "--gpu", "h2000")
    assert done.code == 1 and "unknown GPU 'h2000'" in done.err
    assert main(["gpus", "--json"]) == 0


def test_the_ablation(mbc, package):
    ablations = mbc("show", "tiny.mbc", "--gpu", "h200", "--ablation", "--json").json
    assert [len(s["without"]) for s in ablations] == [0, 1, 2, 3, 4]
    assert all(s["fits"] and s["figures"]["arena_bytes"] > 0 for s in ablations)
    assert "over the first" in mbc("show", "tiny.mbc", "--gpu", "h200", "--ablation", "--without", "micro_batches").out
    refused = mbc("show", package, "--ablation")
    assert refused.code == 1 and "error MBC188" in refused.err


def test_pages_and_traces(mbc, gpu_package):
    shown = mbc("report", gpu_package, "-o", "page.html")
    assert shown.code == 0 and shown.out.startswith("page.html: "), shown.err
    assert Path("page.html").read_text().startswith("<!DOCTYPE html>")
    assert mbc("trace", gpu_package).code == 0
    assert '"traceEvents"' in Path("tiny.trace.json").read_text()
    assert mbc("diff", gpu_package, "tiny.mbc", "-o", "both.html").code == 0
    assert "What changed between these plans" in Path("both.html").read_text()


def test_a_measured_step_beside_a_plan(mbc, gpu_package):
    plan = load_plan((Path(gpu_package) / "plan.json").read_text(), "plan.json")
    names = [launch_name(i, launch) for i, launch in enumerate(plan.train.launches)]
    rows = [{"name": name, "start_us": i, "measured_us": 1} for i, name in enumerate(names)]
    record = {"rows": rows, "step_us": len(rows), "predicted_us": 1, "steps": 3, "sums": []}
    Path("step.json").write_text(json.dumps(record))
    assert mbc("report", gpu_package, "-o", "page.html", "--with", "step.json").code == 0
    assert "How far is the prediction from what was measured?" in Path("page.html").read_text()
    assert mbc("trace", gpu_package, "-o", "trace.json", "--with", "step.json").code == 0
    assert "training step, measured" in Path("trace.json").read_text()
    rows[0]["name"] = "0 another"
    Path("step.json").write_text(json.dumps(record))
    for command in ("report", "trace"):
        refused = mbc(command, gpu_package, "--with", "step.json")
        assert refused.code == 1 and "error MBC321: 'step.json' is a record of another plan" in refused.err
    Path("log.jsonl").write_text('{"kind": "epoch", "step": 1, "epoch": 1, "loss": 1.0, "images_per_s": 1.0}\n')
    refused = mbc("trace", gpu_package, "--with", "log.jsonl")
    assert refused.code == 1 and "error MBC321: 'log.jsonl' holds no measured step" in refused.err


def test_a_page_is_named_after_its_content(mbc, package):
    assert mbc("report", package).out.startswith(f"{Path(package).name}.html: ")
    assert mbc("report", f"{package}/plan.json").out.startswith("plan.html: ")
    copy = Path("net.v2.mbc")
    copy.write_text(Path("tiny.mbc").read_text())
    assert mbc("report", str(copy)).code == 0
    assert {"plan.html", "net.v2.html", f"{Path(package).name}.html"} <= {path.name for path in Path().iterdir()}


def test_a_page_with_the_output_of_fit(mbc):
    Path("curve.json").write_text('{"unlimited": {"train_us": 1.0, "needed_bytes": 2}, "probes": []}')
    shown = mbc("report", "tiny.mbc", "--gpu", "t4", "--with", "curve.json", "--floor")
    assert shown.code == 0, shown.err
    data = data_of(Path("tiny.html").read_text())
    assert [one["what"] for one in data["recorded"]] == ["budgets"] and data["floor"]["total_us"] > 0
    refused = mbc("report", "tiny.mbc", "--with", "tiny.mbc")
    assert refused.code == 1 and "MBC321" in refused.err and "holds no result that a page can show" in refused.err
