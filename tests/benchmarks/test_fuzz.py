"""Hostile inputs. The committed ones are handled correctly, a seeded campaign finds nothing, the judge sees faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import fuzz
import fuzz_worker
from fuzz_rule import CORPUS, Target, Wrong, answer, check_text
from fuzz_targets import TARGETS
from record import Results

from mbc.errors import MbcError

HERE = Path(fuzz.__file__).resolve().parent
COMMITTED = sorted(path.relative_to(CORPUS).as_posix() for path in CORPUS.rglob("*") if path.is_file())
SEEDED = {"sources": 150, "plans": 60, "checkpoints": 700, "profiles": 400, "archives": 500, "onnx": 400,
          "command_lines": 120}  # fmt: skip


@pytest.mark.parametrize("place", COMMITTED)
def test_earlier_findings_keep_the_rule(place: str, tmp_path: Path) -> None:
    name = place.split("/")[0]
    if name not in TARGETS:
        pytest.skip("files of ONNX need the package onnx, an extra")
    said = answer(TARGETS[name], (CORPUS / place).read_bytes(), tmp_path)
    assert said in ("taken", "exit 1") or said.startswith("MBC")


def test_the_corpus_is_small() -> None:
    assert {place.split("/")[0] for place in COMMITTED} == {*TARGETS, "onnx"}
    assert sum((CORPUS / place).stat().st_size for place in COMMITTED) < 500_000


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", list(TARGETS))
def test_a_seeded_campaign_finds_nothing(name: str, tmp_path: Path) -> None:
    row = fuzz.added(fuzz.fresh(name), fuzz.chunk(name, 0, SEEDED[name], guided=False, work=tmp_path))
    assert row["findings"] == [] and row["inputs"] == SEEDED[name]
    assert sum(row["answers"].values()) == SEEDED[name] and len(row["answers"]) >= 3
    assert row["answers"].get("taken", 0) > 0, "some inputs are taken"


def test_a_campaign_ends_at_its_number_of_inputs_with_any_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, int, int]] = []

    def chunk(name: str, seed: int, inputs: int, guided: bool) -> fuzz.Row:
        started.append((name, seed, inputs))
        done = inputs - (len(started) == 2)  # one input killed its process
        return {**fuzz.fresh(name), "inputs": done, "seconds": 1.0, "answers": {"taken": done}}

    monkeypatch.setattr(fuzz, "chunk", chunk)
    monkeypatch.setattr("record.RESULTS", tmp_path)
    held = Results("fuzz", {}, {})
    names = list(TARGETS)
    for name in names:
        held.put(fuzz.fresh(name))
    fuzz.campaign(held, names, 20_000, float("inf"), False, workers=3)
    rows = [held.rows[name] for name in names]
    assert all(row["inputs"] >= 20_000 * TARGETS[row["name"]].share for row in rows)
    assert sum(row["inputs"] for row in rows) == sum(inputs for _, _, inputs in started) - 1
    assert all(row["answers"] == {"taken": row["inputs"]} for row in rows)
    assert len({(name, seed) for name, seed, _ in started}) == len(started), "no draw is made twice"


def _raising(error: BaseException, cause: BaseException | None = None) -> Target:
    def judge(data: bytes, folder: Path) -> str:
        raise error from cause

    return Target("raising", lambda: [b""], lambda data, draw: data, judge, 1.0)


@pytest.mark.parametrize(
    ("error", "cause", "said"),
    [
        (MbcError("MBC172", "refused", ""), None, "without code, message or remedy"),
        (MbcError("172", "refused", "mend it"), None, "without code, message or remedy"),
        (MbcError("MBC172", "refused", "mend it"), MemoryError(), "refused for want of memory"),
    ],
)
def test_errors_that_are_no_answers(tmp_path: Path, error: MbcError, cause: BaseException | None, said: str) -> None:
    with pytest.raises(Wrong, match=said):
        answer(_raising(error, cause), b"", tmp_path)
    assert answer(_raising(MbcError("MBC172", "refused", "mend it")), b"", tmp_path) == "MBC172"


@pytest.mark.parametrize("text", ["\x1b[2J", "a\u202eb", "\x7f", "a\rb", "\x00"])
def test_text_that_acts_on_a_terminal_is_found(text: str) -> None:
    with pytest.raises(Wrong, match="a message with"):
        check_text(text)
    check_text("é\n\tab")


def test_any_other_exception_is_a_finding_once_a_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "raising", _raising(TypeError("a bug")))  # pyright: ignore[reportArgumentType]
    campaign = fuzz_worker.Campaign("raising", tmp_path / "work", tmp_path / "scratch")
    campaign.judge(b"first")
    campaign.judge(b"second")
    result = fuzz.findings(tmp_path / "work")
    assert [one["why"] for one in result] == ["TypeError: a bug"] and campaign.answers == {"finding": 2}
    assert next((tmp_path / "work" / "findings").glob("*.bin")).read_bytes() == b"first"
    assert (campaign.journal.count, campaign.journal.data) == (2, b"second")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("w.HANG_S = 0.2\nwith w.timed(1):\n  while True: pass", -signal.SIGPROF),
        ("w.WAIT_S = 0.2\nimport time\nwith w.timed(1): time.sleep(60)", -signal.SIGALRM),
        ("bytearray(1_500_000_000)", 1),
        ("bytearray(100_000_000)", 0),
    ],
)
def test_limits_of_a_process(body: str, code: int) -> None:
    script = f"import fuzz_worker as w\nw.limit()\n{body}\n"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(HERE)}
    )
    assert done.returncode == code, done.stderr
    assert code != 1 or "MemoryError" in done.stderr


def test_findings_that_are_mended_are_put_aside(tmp_path: Path) -> None:
    folder = tmp_path / "archives"
    fuzz_worker.keep_finding(folder, "once", b"no archive", "ValueError: was not caught")
    assert [one["name"] for one in fuzz.findings(folder)] == ["once"]
    assert fuzz.judge_again("archives", tmp_path) == 1
    assert fuzz.findings(folder) == [] and (folder / "mended" / "once.bin").read_bytes() == b"no archive"
    assert json.loads((folder / "mended" / "once.json").read_text()) == {"why": "ValueError: was not caught"}


def test_overlapping_parts_of_an_archive(tmp_path: Path) -> None:
    from mbc.train.archives import check_archive

    place = CORPUS / "archives" / "parts_over_each_other"
    assert zipfile.is_zipfile(place)
    with pytest.raises(ValueError, match="its parts overlap"):
        check_archive(place)
