"""Campaigns of numbered cases, and a few of the 2,000 random networks of `benchmarks/planned_networks.py`."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import planned_networks
import record
import sharded
from drawn_networks import drawn_network
from sharded import CHUNK, Asked, Verdict, campaign, tell

from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.options import Options
from mbc.plan.model import Predictions
from mbc.source import Source
from tests.graphs import training_graph

CASES = 3 * CHUNK + 5


def judged(seed: int, number: int) -> Verdict:
    if number == seed:
        raise ValueError("a bug")
    return Verdict("even" if number % 2 == 0 else "odd", "13" * (number == 13), {"digits": len(str(number))})


def options(**changes: Any) -> Asked:
    return replace(Asked(CASES, 7, 1, (0, 1), float("inf"), resume=False, merge=0), **changes)


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(sharded, "RESULTS", tmp_path)
    return tmp_path


def test_a_campaign_counts_every_case_once(results: Path) -> None:
    totals = campaign("numbers", judged, options())
    assert totals["outcomes"] == {"even": 33, "odd": 31, "error": 1}
    assert totals["counts"] == {"digits": sum(len(str(i)) for i in range(CASES) if i != 7)}
    assert [(f["number"], f["why"]) for f in totals["failures"]] == [(7, "ValueError: a bug"), (13, "13")]
    assert totals["finished"]
    with pytest.raises(SystemExit, match="2 cases failed"):
        tell(totals)
    assert json.loads((results / "numbers.json").read_text())["outcomes"] == totals["outcomes"]


def test_shards_are_parts_of_one_campaign(results: Path) -> None:
    whole = campaign("numbers", judged, options())
    for number in range(3):
        campaign("numbers", judged, options(shard=(number, 3)))
    merged = campaign("numbers", judged, options(merge=3))
    same = ("outcomes", "counts", "failures", "finished")
    assert {key: merged[key] for key in same} == {key: whole[key] for key in same}
    assert [path.name for path in results.iterdir()] == ["numbers.json"]


def test_a_cut_off_run_continues(results: Path) -> None:
    assert not campaign("numbers", judged, options(seconds=0.0))["finished"]
    first = json.loads((results / "numbers.json").read_text())
    assert first["rows"] == []
    whole = campaign("numbers", judged, options())
    seen: list[int] = []

    def again(seed: int, number: int) -> Verdict:
        seen.append(number)
        return judged(seed, number)

    document = json.loads((results / "numbers.json").read_text())
    document["rows"] = document["rows"][:2]
    (results / "numbers.json").write_text(json.dumps(document))
    resumed = campaign("numbers", again, options(resume=True))
    assert seen == list(range(2 * CHUNK, CASES))
    assert resumed["outcomes"] == whole["outcomes"] and resumed["failures"] == whole["failures"]


def test_drawn_networks_are_networks() -> None:
    """Every drawn network lowers to a graph, unless all its parameters are frozen."""
    refused: list[str] = []
    for number in range(60):
        drawn = drawn_network(random.Random(number), axes=1 + number % 3)
        try:
            training_graph(drawn.source, ("train.precision", drawn.precision))
        except MbcError as error:
            refused.append(error.code)
    assert {*refused} <= {*planned_networks.OF_SOURCES}
    assert len(refused) < 15


def test_more_memory_makes_no_slow_step_slower() -> None:
    """Techniques that are usually tried only if nothing fits are tried for slow steps, too (decision 100)."""
    drawn = drawn_network(random.Random(27))
    source = Source("drawn.mbc", drawn.source)

    def planned(*settings: tuple[str, str]) -> Predictions:
        return compile_plan(
            source, Options(gpu=drawn.gpu, settings=(("train.precision", drawn.precision), *settings))
        ).predictions

    free = planned()
    budgets = [int(share * free.arena_bytes) + free.overhead_bytes for share in (0.64, 0.674)]
    less, more = (planned(("memory.device", f"{budget} B")).train_us for budget in budgets)
    assert free.train_us < more <= less


@pytest.mark.parametrize("number", [0, 5, 7])  # along two, three and one axes
def test_small_networks_are_planned_within_budgets_and_stepped(number: int) -> None:
    verdict = planned_networks.judge(3, number, most_layers=1)
    assert verdict.failure == ""
    assert verdict.outcome == "right"
    assert verdict.counts["plans without a limit"] == verdict.counts["plans at a recommended budget"] == 1
    assert verdict.counts["plans at the size beside a lower bound"] == 1
