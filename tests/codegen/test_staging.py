"""Folders in the making: those of a killed process are removed, those of a running process stay."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mbc.codegen.staging import NEW, OLD, clear, swap, temporary_folder

HOLD = """
import sys, time
from pathlib import Path
from mbc.codegen.staging import OLD, temporary_folder
with temporary_folder(Path(sys.argv[1])) as folder:
    (folder / OLD).mkdir()
    (folder / OLD / "thesis").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Yield another process that is making the package `net`, and its temporary folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "net")], stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert process.stdout is not None
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.wait()


def test_leftovers_of_a_killed_process_go_and_its_package_returns(tmp_path: Path, holder):
    process, left = holder
    clear(tmp_path / "net")
    assert left.is_dir() and not (tmp_path / "net").exists(), "it still runs"
    process.send_signal(signal.SIGKILL)
    process.wait()
    clear(tmp_path / "other")
    assert left.is_dir(), "that of another package"
    clear(tmp_path / "net")
    assert [path.name for path in tmp_path.rglob("*")] == ["net", "thesis"]


def test_a_package_moved_by_a_killed_process_replaces_no_other(tmp_path: Path, holder):
    process, left = holder
    process.kill()
    process.wait()
    (tmp_path / "net").mkdir()
    clear(tmp_path / "net")
    assert not left.exists() and [path.name for path in tmp_path.rglob("*")] == ["net"]


def test_two_at_once_have_a_folder_each(tmp_path: Path):
    with temporary_folder(tmp_path / "net") as first:
        clear(tmp_path / "net")
        with temporary_folder(tmp_path / "net") as second:
            assert first != second and first.is_dir() and second.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_without_locks_nothing_of_others_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(file, operation):
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with temporary_folder(tmp_path / "net") as folder:
        clear(tmp_path / "net")
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_cannot_be_put_in_place_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "net"
    folder.mkdir()
    (folder / "old").touch()
    with temporary_folder(folder) as temporary, pytest.raises(FileNotFoundError):
        swap(temporary / NEW, folder, temporary / OLD)
    assert (folder / "old").exists()


def test_long_names(tmp_path: Path):
    longest = "n" * os.pathconf(tmp_path, "PC_NAME_MAX")
    with temporary_folder(tmp_path / longest) as folder:
        assert folder.is_dir()


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_package_is_put_in_the_place_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    new, old, folder = tmp_path / "new", tmp_path / "old", tmp_path / "net"
    for place in (new, folder):
        place.mkdir()
        (place / "of").write_text(place.name)
    renamed: list[str] = []
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, target: (renamed.append(self.name), rename(self, target))[1])
    if not exchanges:
        monkeypatch.setattr("mbc.codegen.staging._exchange", lambda one, other: False)
    swap(new, folder, old)
    assert (folder / "of").read_text() == "new"
    if exchanges and sys.platform == "linux":
        assert renamed == [] and (new / "of").read_text() == "net", "there was a whole package at every moment"
    else:
        assert renamed == ["net", "new"] and (old / "of").read_text() == "net"
