"""Files that appear whole or not at all, and the consequences of interrupted writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mbc.runtime import replace
from mbc.runtime.replace import remove_leftovers, replace_file, try_replacing

WRITER = """
import sys, time
from pathlib import Path
from mbc.runtime.replace import replace_file
def parts():
    yield b"half"
    print("half", flush=True)
    time.sleep(600)
replace_file(Path(sys.argv[1]), parts())
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_write(tmp_path: Path, end: signal.Signals):
    file = tmp_path / "c"
    replace_file(file, [b"whole"])
    command = [sys.executable, "-c", WRITER, str(file)]
    root = Path(__file__).resolve().parents[2]
    # As from a terminal: what runs in the background is started with interrupts ignored.
    started = subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert started.stdout is not None and started.stdout.readline() == b"half\n"
    assert len(names(tmp_path)) == 2
    # While it is being written, it does not count as left behind.
    remove_leftovers(file)
    try_replacing(file)
    assert len(names(tmp_path)) == 2
    started.send_signal(end)
    started.wait()
    started.stdout.close()
    assert file.read_bytes() == b"whole"
    assert len(names(tmp_path)) == (2 if end is signal.SIGKILL else 1)
    replace_file(file, [b"new"])
    assert names(tmp_path) == ["c"] and file.read_bytes() == b"new"


def test_several_write_the_same_file(tmp_path: Path):
    file = tmp_path / "c"
    errors: list[Exception] = []

    def write(letter: bytes) -> None:
        try:
            for _ in range(20):
                replace_file(file, [letter * 1000] * 10)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and names(tmp_path) == ["c"]
    assert file.read_bytes() in (letter * 10_000 for letter in (b"a", b"b", b"c"))


def test_a_file_that_is_removed_before_it_is_locked_is_created_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make = replace.tempfile.mkstemp
    created: list[str] = []

    def take_away(**named: Any) -> tuple[int, str]:
        number, name = make(**named)
        created.append(name)
        if len(created) == 1:
            Path(name).unlink()
        return number, name

    monkeypatch.setattr(replace.tempfile, "mkstemp", take_away)
    replace_file(tmp_path / "c", [b"whole"])
    assert len(created) == 2 and names(tmp_path) == ["c"]


def test_special_files_are_not_replaced(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "pipe", tmp_path / "folder", Path("/dev/null")):
        for call in (lambda place=place: replace_file(place, [b"x"]), lambda place=place: try_replacing(place)):
            with pytest.raises(OSError, match=r"it is (not an ordinary file|a folder)"):
                call()
    assert names(tmp_path) == ["folder", "pipe"]
