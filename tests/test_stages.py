"""The stages of a compilation: their seconds, their dumps, and that a source is parsed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbc.compiler import compile_plan, compile_source
from mbc.errors import MbcError
from mbc.fit import own_batch
from mbc.frontend.parse import parse
from mbc.frontend.tree import TreeReader
from mbc.options import Options
from mbc.source import Source
from mbc.stages import Stages

NETWORK = Source(
    "n.mbc",
    """
    network small(batch = 4) {
      input x[batch, 4] : float
      y = x |> linear(4)
      output y
      loss (y, x) |> mse
    }
    """,
)
FP64 = Options(gpu="h200", settings=(("train.precision", "fp64"),))


def test_the_seconds_of_a_stage_that_runs_again_are_added_up(monkeypatch):
    ticks = iter((0.0, 1.0, 10.0, 12.0, 20.0, 24.0, 30.0, 38.0))
    monkeypatch.setattr("mbc.stages.perf_counter", lambda: next(ticks))
    said: list[str] = []
    stages = Stages(announce=said.append)
    for name in ("measure again", "search again", "measure again", "build package"):
        assert stages.run(name, lambda name=name: name.upper()) == name.upper()
    assert stages.seconds == {"measure again": 5.0, "search again": 2.0, "build package": 8.0}
    assert (stages.measuring_seconds, stages.planning_seconds, stages.building_seconds) == (5.0, 2.0, 8.0)
    assert said == ["measure again", "search again", "measure again", "build package"]


def test_each_run_of_a_stage_is_dumped_into_its_own_file(tmp_path):
    stages = Stages(str(tmp_path / "dumped"))
    for text in ("first", "second"):
        stages.run("search again", lambda text=text: text, str)
    texts = {path.name: path.read_text() for path in (tmp_path / "dumped").iterdir()}
    assert texts == {"01_search_again.txt": "first", "02_search_again.txt": "second"}


def test_a_source_is_parsed_once_however_often_it_is_compiled(monkeypatch):
    read, parsed = TreeReader.program, []

    def program(reader, tree):
        parsed.append(tree)
        return read(reader, tree)

    monkeypatch.setattr(TreeReader, "program", program)
    parse.cache_clear()
    assert own_batch(NETWORK, FP64) == 4
    for batch in ("4", "8"):
        plan = compile_plan(NETWORK, Options(gpu="h200", settings=(*FP64.settings, ("batch", batch))))
        assert plan.graph.batch == int(batch)
    assert len(parsed) == 1


def test_a_source_becomes_a_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compiled = compile_source(NETWORK, FP64)
    assert compiled.plan == compile_plan(NETWORK, FP64)
    assert compiled.package.folder == Path("small") and (tmp_path / "small" / "plan.json").is_file()
    assert compile_source(NETWORK, FP64, Path("other"), overwrite=True).package.folder == Path("other")
    monkeypatch.setattr("mbc.planner.search", None)
    with pytest.raises(MbcError, match="'small' exists") as refused:
        compile_source(NETWORK, FP64)
    assert refused.value.code == "MBC093"


def test_an_unknown_technique_is_refused() -> None:
    with pytest.raises(MbcError) as caught:
        compile_plan(NETWORK, Options(gpu="h200", without=frozenset({"magic"})))
    assert caught.value.code == "MBC206" and "no technique 'magic'" in caught.value.message
    assert "name some of offload, recompute" in caught.value.remedy
