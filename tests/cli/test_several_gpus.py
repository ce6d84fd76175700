"""Commands on plans for several GPUs."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import pytest

from mbc.cli.arguments import parse
from mbc.cli.arguments.argument_types import network
from tests.report.pages import data_of


@pytest.fixture
def package(mbc):
    """Three ranks of 3, 3 and 2 rows."""
    done = mbc("compile", "tiny.mbc", "--gpus", "3", "--gpu", "h200")
    assert done.code == 0, done.err
    return done


def test_compile_says_how_the_rows_are_shared(mbc, package):
    lines = package.out.splitlines()
    assert lines[0].startswith("tiny: batch 8 shared by 3 GPUs (2 x 3 + 2 rows), fp32, for NVIDIA H200")
    assert any(line.startswith("  all-reduce ") and "thread blocks" in line for line in lines)
    assert any(line.startswith("  rank 2: 2 rows on NVIDIA H200, step ~") and " measured)" in line for line in lines)
    assert "mbc profile NET --set batch=3 measures the rest" in package.out
    document = mbc("compile", "tiny.mbc", "--gpus", "3", "--gpu", "h200", "--force", "--json").json
    assert document["batch"] == 8 and document["collectives"]["rows"] == [3, 3, 2]
    assert [other["members"] for other in document["other_ranks"]] == [[2]]
    assert document["fastest_us"] > document["critical_path_us"] > 0
    alone = mbc("compile", "tiny.mbc", "--gpu", "h200", "--force", "--json").json
    assert alone["collectives"] is None and alone["other_ranks"] == []


def test_a_faster_network_between_machines_shortens_the_step(mbc):
    arguments = "compile", "tiny.mbc", "--gpus", "4", "--gpu", "h200", "--force", "--json"
    links, times_us = [], []
    for more in ((), ("--node-link", "100GbE"), ("--node-link", "2x200Gb")):
        document = mbc(*arguments, "--gpus-per-node", "2", *more).json
        links.append(document["collectives"]["links"].partition(" between machines, 2 GPUs in each by nvlink")[0])
        times_us.append(document["train_us"])
    assert links == ["25Gb assumed", "100Gb", "400Gb"] and times_us == sorted(times_us, reverse=True)
    assert times_us[0] > times_us[2] >= mbc(*arguments).json["train_us"]
    text = mbc(*arguments[:-1], "--gpus-per-node", "1", "--node-link", "400Gb").out
    assert "  machines   400Gb between machines, 1 GPU in each\n" in text
    assert "in each direction (400Gb between machines, 1 GPU in each);" in mbc("show", "tiny").out
    unused = mbc(*arguments, "--node-link", "100Gb")
    assert unused.json["collectives"]["links"] == "" and "all GPUs are in one machine" in unused.err


@pytest.mark.parametrize(
    ("text", "gbit"),
    [("400Gb", 400), ("100GbE", 100), ("2x200Gb", 400), ("2.5Gb", 2.5), ("25Gbit/s", 25), ("8x400Gb/s", 3200)],
)
def test_rates_of_networks(text: str, gbit: float):
    assert network(text) == gbit


@pytest.mark.parametrize("text", ["", "400", "50GB", "400gb", "0Gb", "0x100Gb", "x100Gb", "-1Gb", "1e3Gb", "nanGb"])
def test_words_that_are_no_networks(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="no rate of a network such as 400Gb, 100GbE or 2x200Gb"):
        network(text)


def test_show(mbc, package):
    shown = mbc("show", "tiny")
    assert shown.code == 0, shown.err
    sums = [line.split() for line in shown.out.splitlines() if "nccl/all_reduce" in line]
    assert sums and all("all_reduce*" in words and "collective" in words for words in sums)
    assert "a link carries" in shown.out and "a link carries" not in mbc("show", "tiny", "--infer").out
    document = mbc("show", "tiny", "--json").json
    streams = {row["stream"] for row in document["train"]["operations"] if row["kind"].startswith("all_reduce")}
    assert streams == {"collective"} and document["collectives"]["buckets"]
    assert mbc("show", "tiny.mbc", "--gpus", "3", "--gpu", "h200").out == shown.out


def test_the_roofline_bounds_sums_by_the_link(mbc, package):
    rows = mbc("show", "tiny", "--roofline", "--json").json["operations"]
    assert {row["bound"] for row in rows if row["kind"].startswith("all_reduce")} == {"link"}
    assert "link" not in {row["bound"] for row in rows if not row["kind"].startswith("all_reduce")}
    assert "memory and link" in mbc("show", "tiny", "--roofline").out


def test_the_ablation(mbc):
    done = mbc("show", "tiny.mbc", "--gpus", "2", "--gpu", "h200", "--ablation")
    assert done.code == 0, done.err


def test_verify_takes_all_ranks_of_a_package(mbc, package):
    done = mbc("verify", "tiny")
    assert done.code == 0 and "tiny/rank2/plan.json computes what its graph says" in done.out
    assert done.out.endswith("3 ranks sum the same in one order, and each row of the mini-batch counts once\n")
    document = mbc("verify", "tiny", "--json").json
    assert document["together"] and [other["plan"] for other in document["other_plans"]] == ["tiny/rank2/plan.json"]
    for place in ("tiny/plan.json", "tiny/rank2"):
        assert "give the package to verify them together" in mbc("verify", place).out


def test_verify_refuses_sets_that_do_not_fit(mbc, package):
    assert mbc("compile", "tiny.mbc", "--set", "batch=9", "--gpus", "3", "--gpu", "h200", "-o", "nine").code == 0
    shutil.rmtree("tiny/rank2")
    alone = mbc("verify", "tiny")
    assert alone.code == 1
    assert "MBC135: plans of several GPUs: they are for the ranks [0, 1], not for each of 3" in alone.err
    Path("tiny/rank2").mkdir()
    shutil.copy("nine/plan.json", "tiny/rank2/plan.json")
    mixed = mbc("verify", "tiny")
    assert mixed.code == 1 and "they share a mini-batch in different ways" in mixed.err


def test_diff(mbc, package):
    assert mbc("compile", "tiny.mbc", "--gpus", "2", "--gpu", "h200", "-o", "two").code == 0
    done = mbc("diff", "two", "tiny")
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.splitlines()]
    assert ["GPUs", "2", "3"] in rows and ["rows", "of", "each", "GPU", "4,", "4", "3,", "3,", "2"] in rows
    totals = mbc("diff", "two", "tiny", "--json").json["totals"]
    assert totals["all_reduce_us"]["before"] < totals["all_reduce_us"]["after"] and "batch" not in totals


def test_check_refuses_launches_of_several_gpus(mbc, package):
    refused = mbc("check", "tiny", "--launches", "--device", "cpu")
    assert refused.code == 1 and "MBC279: launches are checked in one process, and 'tiny' is a plan for" in refused.err


def test_plans_in_fp64(mbc):
    done = mbc("compile", "tiny.mbc", "--gpus", "2", "--set", "train.precision=fp64")
    assert done.code == 0 and "for the CPU" in done.out and "shared by 2 GPUs" in done.out
    assert mbc("show", "tiny").code == 0 and json.loads(mbc("show", "tiny", "--json").out)["collectives"] is None
    assert "2 ranks sum the same" in mbc("verify", "tiny").out


def test_unlike_gpus(mbc):
    done = mbc("compile", "tiny.mbc", "--gpus", "h200,t4", "--set", "batch=64")
    assert done.code == 0, done.err
    (other,) = [line for line in done.out.splitlines() if line.startswith("  rank 1: ")]
    assert " on NVIDIA T4, step ~" in other or " on Tesla T4, step ~" in other
    verified = mbc("verify", "tiny")
    assert verified.code == 0 and "2 ranks sum the same in one order" in verified.out
    differ = mbc("diff", "tiny.mbc", "--gpus", "h200,t4", "--set", "batch=64")
    assert differ.code == 0 and "rank 0 (NVIDIA H200)" in differ.out and "rank 1 (" in differ.out
    assert mbc("diff", "tiny", "tiny/rank1", "-o", "both.html").code == 0
    assert mbc("trace", "tiny", "-o", "trace.json").code == 0 and mbc("report", "tiny", "-o", "page.html").code == 0
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert "tiny: training step of rank 1, predicted" in processes
    page, both = Path("page.html").read_text(), Path("both.html").read_text()
    assert [other["ranks"] for other in data_of(page)["others"]] == ["rank 1"] and "2 GPUs: NVIDIA H200 " in page
    # Both sides of a diff name the GPUs of all ranks, and the GPU that is compared.
    (gpus,) = re.findall(r"<h1>tiny: batch 64, \w+, (.*?)</h1>", page)
    assert f"{gpus}; compared: rank 0" in both and "another" not in gpus
    assert re.search(r"another \d+ rows \+ (NVIDIA|Tesla) T4 \d+ rows; compared: rank 1", both)
    document = mbc("compile", "tiny.mbc", "--gpus", "h200,t4", "--set", "batch=64", "--force", "--json").json
    assert document["collectives"]["rows"][0] + document["other_ranks"][0]["batch"] == document["batch"] == 64


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("h200,t4:", "'h200,t4:' is neither a number of GPUs nor names such as h200,h100:40GB"),
        ("h200:40GB", "'h200:40GB' is one GPU: --gpu h200 plans for it"),
        ("-2", "'-2' is not a whole number above 0"),
        ("1,2", "'1,2' is neither a number of GPUs nor names such as h200,h100:40GB"),
        ("h200,t4:many", "argument --gpus: 'many'"),
    ],
)
def test_words_that_are_no_gpus(words: str, said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(["compile", "tiny.mbc", "--gpus", words])
    assert said in capsys.readouterr().err


def test_one_option_twice(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(["compile", "tiny.mbc", "--gpu", "h200", "--gpu", "h100"])
    assert "argument --gpu: given twice, as h200 and as h100" in capsys.readouterr().err


def test_gpus_that_are_unknown_or_too_small(mbc):
    assert "error MBC070" in mbc("compile", "tiny.mbc", "--gpus", "h200,h9000").err
    refused = mbc("compile", "tiny.mbc", "--gpus", "h200,t4", "--gpu", "l4")
    assert "error MBC285: --gpus names the GPUs already, and --gpu names one, too" in refused.err
    refused = mbc("compile", "tiny.mbc", "--gpus", "h200:1MB,t4:1MB")
    assert refused.code == 1 and "error MBC284: no share of 8 rows was found that fits 2 GPUs" in refused.err


def test_more_gpus_than_rows(mbc):
    refused = mbc("compile", "tiny.mbc", "--gpus", "9", "--gpu", "h200")
    assert refused.code == 1 and "MBC280: a mini-batch of 8 cannot be shared by 9 GPUs" in refused.err
