"""Ends of the command by something other than its work: bugs, signals, output that nobody reads."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mbc.cli import BUG, INTERRUPTED, TERMINATED
from mbc.version import __version__

MBC = (sys.executable, "-m", "mbc.cli")


def test_an_unforeseen_error_is_a_bug_with_a_report(mbc, monkeypatch):
    def fail(*_):
        raise IndexError("list index out of range")

    monkeypatch.setattr("mbc.cli.verify_command.read_plan", fail)
    Path("a b.json").write_text("{}")
    done = mbc("verify", "a b.json")
    assert done.code == BUG and done.out == ""
    assert done.err.startswith("Traceback (most recent call last):\n")
    assert "IndexError: list index out of range\n\nThis is a bug in mbc: " in done.err
    assert f"\n  mbc      {__version__}\n  command  mbc verify 'a b.json'\n  Python   3." in done.err


def test_ctrl_c_is_one_line(mbc, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mbc.planner.search", interrupt)
    done = mbc("show", "tiny.mbc", "--gpu", "h200")
    assert (done.code, done.out, done.err) == (INTERRUPTED, "", "interrupted\n")


def test_ctrl_c_while_arguments_are_read(mbc, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mbc.cli.arguments.parse", interrupt)
    done = mbc("gpus")
    assert (done.code, done.err) == (INTERRUPTED, "interrupted\n")


def test_sigterm_leaves_nothing_behind(tmp_path):
    script = (
        "import sys, tempfile, time, mbc.cli, mbc.cli.gpus_command as gpus\n"
        "def wait(_):\n"
        f"    with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}) as folder:\n"
        "        open(folder + '/entered', 'w').close()\n"
        "        time.sleep(600)\n"
        "gpus.run = wait\n"
        "sys.exit(mbc.cli.main(['gpus']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    while not list(tmp_path.glob("*/entered")):  # before, nobody owns the folder
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    assert process.wait() == TERMINATED
    assert list(tmp_path.iterdir()) == []


def test_the_handler_of_sigterm_is_put_back(mbc):
    before = signal.getsignal(signal.SIGTERM)
    mbc("gpus")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_reader_that_has_seen_enough_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*MBC, "gpus"], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_that_cannot_be_written():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*MBC, "gpus"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error MBC240: cannot write the output: No space left on device\nhelp: ")


def test_a_closed_output_is_no_bug():
    command = f"{sys.executable} -m mbc.cli gpus >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "nnn"),
            "error MBC241: cannot use 'nnn': File name too long",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "error MBC241: cannot use a file: No space left on device"),
        (MemoryError("Unable to allocate 9 TiB"), "error MBC242: this machine has too little memory for that ("),
    ],
)
def test_refusals_of_the_machine_are_no_bug(mbc, monkeypatch, error, message):
    def refuse(*_):
        raise error

    monkeypatch.setattr("mbc.cli.gpus_command.run", refuse)
    done = mbc("gpus")
    assert done.code == 1 and done.out.strip() == ""
    assert done.err.startswith(message) and "\nhelp: " in done.err


def test_names_that_are_too_long_are_no_bug(mbc):
    assert "error MBC241: cannot use '" in mbc("show", "n" * 300).err


@pytest.mark.parametrize("arguments", [("list", ""), ("merge", "", "-o", "m.sqlite")])
def test_empty_names_of_profiles_are_no_bug(mbc, arguments):
    done = mbc("profile", *arguments)
    assert done.code == 1 and done.err.startswith("error MBC07")
