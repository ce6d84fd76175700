"""Digests of code in results: results of other code are listed, and benchmarks run again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import correctness
import record
import stale
from correctness import Stage

from mbc.provenance import digests


def old() -> dict[str, str]:
    return dict.fromkeys(digests(), "0" * 16)  # not while tests are collected: the digests take seconds


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the folders of results by two empty ones, that of this run and that of the checkout."""
    folder = tmp_path / "results"
    folder.mkdir()
    for module in (record, stale, correctness):
        monkeypatch.setattr(module, "RESULTS", folder)
    monkeypatch.setattr(record, "ROOT", tmp_path / "checkout")
    monkeypatch.setattr(correctness, "ROOT", tmp_path / "checkout")
    return folder


def put(folder: Path, name: str, **document: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps({"rows": [], **document}))
    return path


def test_changed_parts_are_listed(results: Path) -> None:
    now = digests()
    for name, document, expected in (
        ("a.json", {"code": now}, ""),
        ("b.json", {"code": {**now, "kernels": "0" * 16}}, "kernels changed"),
        ("c.json", {"code": {**now, "planner": "0" * 16}}, "planner changed"),
        ("gradients_cuda.json", {"code": {**now, "planner": "0" * 16}}, ""),  # its plans were not searched
        ("gradients_cuda.json", {"code": {**now, "kernels/pool": "0" * 16}}, "kernels/pool changed"),
        ("bench_bf16.json", {"code": {**now, "kernels/fp32_emulated": "0" * 16, "imports": "0" * 16}}, ""),
        ("e.json", {}, stale.UNKNOWN),
        ("f.json", {"code": now, "rows": [{"name": "kept", "code": {**now, "planner": ""}}]}, "planner changed"),
        ("g.json", {"code": now, "rows": [{"name": "kept", "code": None}]}, stale.UNKNOWN),
    ):
        assert stale.older(put(results, name, **document), now) == expected, name
    text = results / "sanitizer.txt"
    text.write_text("".join(f"code {part} {digest}\n" for part, digest in now.items()) + "digits fp32: exit 0\n")
    assert stale.older(text, now) == ""
    text.write_text("digits fp32: exit 0\n")
    assert stale.older(text, now) == stale.UNKNOWN


def listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["stale.py", *arguments])
    status = 0
    try:
        stale.main()
    except SystemExit as ended:
        status = int(ended.code or 0)
    return status, capsys.readouterr().out


def test_the_list(results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = [pattern.replace("*", "x") for pattern in stale.CORRECTNESS if pattern.endswith(".json")]
    for name in names:
        put(results, name, code=digests())
    status, text = listed(monkeypatch, capsys, "--strict")
    assert status == 1 and "sanitizer.txt" in text and "there is none" in text
    (results / "sanitizer.txt").write_text("".join(f"code {p} {d}\n" for p, d in digests().items()))
    put(results, "planning_time.json", code=old())
    status, text = listed(monkeypatch, capsys, "--strict")
    assert status == 0 and "planning_time.json" in text and "steps20.json" not in text
    put(results, "steps20.json", code=old())
    assert listed(monkeypatch, capsys)[0] == 0
    status, text = listed(monkeypatch, capsys, "--strict")
    assert status == 1 and "2 of " in text and "1 on correctness" in text


def test_results_name_the_code_that_ran() -> None:
    held = json.loads(record.write("one", [{"name": "a"}]).read_text())
    assert held["code"] == digests()


def test_rows_of_other_code_say_so_or_are_left(results: Path) -> None:
    put(results, "one.json", code=old(), rows=[{"name": "a", "ms": 1.0}], device="cpu")
    result = record.results("one")
    assert result.rows["a"]["code"] == old()
    result.put({"name": "b"})
    assert stale.older(results / "one.json", digests()).endswith("operations changed, planner changed")
    assert [row.get("code") for row in json.loads((results / "one.json").read_text())["rows"]] == [old(), None]
    put(results, "one.json", code=old(), rows=[{"name": "a"}])
    assert not record.results("one", current=True).rows and record.current_rows("one") == []
    put(results, "one.json", code=digests(), rows=[{"name": "a"}], device="cpu")
    assert record.results("one", current=True, device="cpu").rows and record.current_rows("one") == [{"name": "a"}]
    assert not record.results("one", current=True, device="cuda").rows


def test_rows_that_are_made_again_are_replaced_one_by_one(results: Path) -> None:
    before = [{"name": "a", "ms": 1}, {"name": "b", "ms": 2}, {"name": "c", "failed": "cut off"}]
    put(results, "one.json", code=old(), rows=before, size=64)
    again = record.results("one", again=True, size=64)
    assert not any(map(again.done, "abc")) and again.kept("a") == {}
    again.put({"name": "b", "ms": 3})
    assert again.done("b") and not again.done("a")
    rows = json.loads((results / "one.json").read_text())["rows"]
    assert [(row["name"], row.get("ms"), "code" in row) for row in rows] == [
        ("a", 1, True),
        ("b", 3, False),
        ("c", None, True),
    ]
    assert [record.results("one", size=64).done(name) for name in "abc"] == [True, True, False]
    assert not record.results("one", again=True, size=96).rows  # the file names one size for all rows


def test_a_campaign_that_counts_again_counts_from_0(results: Path) -> None:
    put(results, "fuzz.json", code=digests(), rows=[{"name": name, "inputs": 5, "seconds": 1.0} for name in "ab"])
    held = record.results("fuzz", again=True)
    held.put({"inputs": 0, **held.kept("a"), "name": "a"})
    assert [row["inputs"] for row in held.rows.values()] == [0, 5]


WRITES = """
import json, os, sys, time
path = os.path.join(os.environ["MBC_RESULTS"], sys.argv[1] + ".json")
time.sleep(float(sys.argv[2]))
json.dump({"code": json.loads(sys.argv[3]), "rows": json.loads(sys.argv[4])}, open(path, "w"))
"""


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs `correctness.py` with the given stages.

    Each stage is a script that writes given rows after a given time.
    """
    script = tmp_path / "writes.py"
    script.write_text(WRITES)

    def stage(name: str, seconds: float = 0.0, rows: str = "[]", code: Any = None, alone: bool = False) -> Stage:
        text = (name, str(seconds), json.dumps(code or digests()), rows)
        return Stage(name, (str(script), *text), (f"{name}.json",), 1.0, alone)

    def run(*stages: Stage, for_s: float = 60.0) -> dict[str, Any]:
        monkeypatch.setitem(correctness.STAGES, "cpu", stages)
        monkeypatch.setattr(sys, "argv", ["correctness.py", "--device", "cpu", "--for", str(for_s)])
        correctness.main()
        return record.results("correctness").rows

    return stage, run


def test_stages_run_once_and_again_if_cut_off(staged, capsys: pytest.CaptureFixture[str]) -> None:
    stage, run = staged
    first = stage("first", rows='[{"name": "a", "passed": false}, {"name": "b", "passed": true}]')
    rows = run(first, stage("slow", seconds=60), stage("last", alone=True), for_s=2 * correctness.GRACE_S + 2)
    assert rows["first"]["not_passed"] == ["a"] and rows["first"]["rows"] == 2 and "failed" not in rows["first"]
    assert "cut off" in rows["slow"]["failed"] and "last" not in rows  # no time was left for it
    assert "left: slow, last" in capsys.readouterr().out
    rows = run(first, stage("slow"), stage("last", alone=True))
    text = capsys.readouterr().out
    assert "first begins" not in text and "slow begins" in text and "last begins" in text and "all are made" in text
    assert not [row for row in rows.values() if "failed" in row]


def test_a_stage_that_wrote_nothing_of_today_has_failed(results: Path, staged) -> None:
    stage, run = staged
    rows = run(
        stage("old", code=old()), stage("broken", rows="no JSON"), stage("item", rows='[{"name": "a", "failed": "x"}]')
    )
    assert rows["old"]["failed"] == "old.json was not written"
    assert rows["broken"]["failed"] == "broken.json was not written" and "JSONDecodeError" in rows["broken"]["log"][-1]
    assert rows["item"]["failed"] == "rows failed: a"


def test_every_result_on_correctness_has_a_stage() -> None:
    files = {file for stages in correctness.STAGES.values() for stage in stages for file in stage.files}
    assert all(stale.on_correctness(file) for file in files)


def test_scripts_of_stages_are_there() -> None:
    for stages in correctness.STAGES.values():
        for stage in stages:
            assert (correctness.HERE / stage.command[0]).is_file(), stage.name
