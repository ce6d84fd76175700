"""`mbc fmt`."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from mbc.cli import main
from tests.cli.conftest import SOURCE

UNTIDY = SOURCE.replace("  input", "\tinput").replace(" = ", "=")


@pytest.fixture
def untidy(mbc) -> Path:
    path = Path("untidy.mbc")
    path.write_text(UNTIDY)
    return path


def test_a_source_is_written_in_its_place(mbc, untidy):
    untidy.chmod(0o640)
    done = mbc("fmt", "untidy.mbc", "tiny.mbc")
    assert (done.code, done.out, done.err) == (0, "untidy.mbc\n", "")
    assert untidy.read_text() == SOURCE
    assert untidy.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in Path().iterdir()) == ["tiny.mbc", "untidy.mbc"]
    assert mbc("fmt", "untidy.mbc").out == ""


def test_a_check_writes_nothing_and_names_files(mbc, untidy):
    done = mbc("fmt", "--check", "untidy.mbc", "tiny.mbc")
    assert (done.code, done.out) == (1, "untidy.mbc\n")
    assert untidy.read_text() == UNTIDY
    assert mbc("fmt", "--check", "tiny.mbc").code == 0


def test_stdout_and_stdin(mbc, untidy, monkeypatch):
    assert mbc("fmt", "--stdout", "untidy.mbc").out == SOURCE
    assert untidy.read_text() == UNTIDY
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(UNTIDY.encode())))
    assert mbc("fmt", "-").out == SOURCE
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    refused = mbc("fmt", "-")
    assert refused.code == 1 and "error MBC183: cannot read stdin: it is not UTF-8 text (byte 0)" in refused.err


def test_line_ends_and_links_stay(mbc, untidy):
    untidy.write_bytes(UNTIDY.replace("\n", "\r\n").encode())
    Path("link.mbc").symlink_to(untidy)
    assert mbc("fmt", "link.mbc").code == 0
    assert untidy.read_bytes() == SOURCE.replace("\n", "\r\n").encode()
    assert Path("link.mbc").is_symlink()
    assert mbc("fmt", "--check", "link.mbc").code == 0


def test_a_source_with_a_mistake_stays_and_others_are_laid_out(mbc, untidy):
    Path("wrong.mbc").write_text("network a {\n x = (1\n}\n")
    done = mbc("fmt", "wrong.mbc", "missing.mbc", "untidy.mbc")
    assert done.code == 1 and done.out == "untidy.mbc\n"
    assert "error MBC002" in done.err and "wrong.mbc:3:1" in done.err
    assert "error MBC183: cannot read 'missing.mbc'" in done.err
    assert Path("wrong.mbc").read_text() == "network a {\n x = (1\n}\n"
    Path("plan.json").write_text("{}")
    assert "error MBC188: 'plan.json' is planned already" in mbc("fmt", "plan.json").err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(mbc, untidy, tmp_path):
    tmp_path.chmod(0o555)
    try:
        refused = mbc("fmt", "untidy.mbc")
    finally:
        tmp_path.chmod(0o755)
    assert refused.code == 1 and "MBC325: cannot write" in refused.err


def test_a_file_that_cannot_be_replaced(mbc, untidy, monkeypatch):
    def full(path: Path, parts: object, mode: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mbc.runtime.replace.replace_file", full)
    refused = mbc("fmt", "untidy.mbc")
    assert refused.code == 1 and untidy.read_text() == UNTIDY
    assert "error MBC325: cannot write" in refused.err and "No space left on device" in refused.err
    assert "help: mbc fmt --stdout prints the layout" in refused.err


def test_check_and_stdout_exclude_each_other(mbc, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["fmt", "--check", "--stdout", "tiny.mbc"])
    assert ended.value.code == 2
    assert "not allowed with" in capsys.readouterr().err
