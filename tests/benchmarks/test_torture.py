"""Sudden ends: a few kills and difficult environments; and half-written files are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from torture_subjects import SUBJECTS, digest

HERE = Path(__file__).resolve().parents[2] / "benchmarks"
# Forks are of a process without threads: not of one of pytest's.
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}

HALF_WRITTEN = """
import random, sys
from pathlib import Path
from sudden_ends import Killer, calls_of
from torture import Bench, killed
from torture_subjects import Subject

def begin(folder): (folder / "file").write_text("old old")
def work(folder):
    {write}
    return 0
def wrong(folder):
    text = (folder / "file").read_text() if (folder / "file").exists() else "gone"
    return "" if text in ("old old", "new new") else f"there is {{text!r}}"
def state(folder): return (folder / "file").read_text()
subject = Subject("file", begin, work, wrong, wrong, work, state)
row = killed(Bench(Path(sys.argv[1])), subject, 24, 1)
print(row["kills"], len(row["wrong"]))
"""
IN_PLACE = (
    "file = (folder / 'file').open('w');"
    " [(file.write(part), file.flush(), Path('/').exists()) for part in ('new ', 'new')]"
)
AT_ONCE = "(folder / 'part').write_text('new new'); (folder / 'part').replace(folder / 'file')"


def _python(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**ENVIRONMENT, **environment}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("write", "is_noticed"), [(IN_PLACE, True), (AT_ONCE, False)], ids=["in place", "at once"])
def test_files_that_are_half_written_are_noticed(tmp_path: Path, write: str, is_noticed: bool) -> None:
    kills, wrong = _python("-c", HALF_WRITTEN.format(write=write), str(tmp_path)).split()
    assert int(kills) == 24 and (int(wrong) > 0) == is_noticed


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", [("kill",), ("disk: p", "clock set back: t", "processes: p")])
def test_a_short_torture(tmp_path: Path, words: tuple[str, ...]) -> None:
    script = str(HERE / "torture.py")
    _python(script, "--kills", "6", "--trials", "2", "--again", "--only", *words, MBC_RESULTS=str(tmp_path))
    rows = json.loads((tmp_path / "torture.json").read_text())["rows"]
    assert rows and all(row["wrong"] == [] and "failed" not in row for row in rows)
    assert "kill" not in words or [row["kills"] for row in rows] == [2] * len(SUBJECTS)


def test_each_subject_recognises_whole_files(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "plan.json").write_text("{")
    (tmp_path / "known.json").write_text(json.dumps([digest(tmp_path / "package")]))
    assert SUBJECTS["compile"].wrong(tmp_path) == ""
    assert "MBC110" in SUBJECTS["compile"].glance(tmp_path)
    (tmp_path / "package" / "plan.json").write_text("{}")
    assert "neither the old nor the new" in SUBJECTS["compile"].wrong(tmp_path)
    (tmp_path / "p.sqlite").write_bytes(b"SQLite format 3\0")
    assert "MBC073" in SUBJECTS["profile"].wrong(tmp_path)
    assert SUBJECTS["train"].wrong(tmp_path) == ""
    (tmp_path / "w.safetensors").write_bytes(b"half")
    assert "MBC163" in SUBJECTS["train"].wrong(tmp_path)
    (tmp_path / "w.safetensors").unlink()
    (tmp_path / "log.jsonl").write_text('{"kind": "epo')
    assert "half-written" in SUBJECTS["train"].wrong(tmp_path)
