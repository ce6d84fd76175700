"""Profiles: a written file is read again, and every fault of a file has its message."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.ir.types import Precision
from mbc.options import Options
from mbc.plan.file import dump_plan, load_plan
from mbc.profile.model import Measurement, Overhead, calibrated, signature
from mbc.profile.read_profile import read_profile
from mbc.profile.schema import SCHEMA_VERSION
from mbc.profile.writer import ProfileWriter, fold_log
from mbc.source import Source
from tests.profile.profiles import GPU, IDENTITY, measurement, request

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a profile with one request, which has two usable candidates and a refused one."""
    path = tmp_path / "folder" / "p.sqlite"
    refused = replace(measurement(9, 0.0), refused="wrong result")
    with ProfileWriter(path, IDENTITY) as writer:
        writer.record(request(), [measurement(1, 20.0), measurement(2, 10.0, 4096), refused])
        writer.record_overhead(Overhead("context", "", 100))
        writer.record_overhead(Overhead("step", "digits", 300))
    return path


def check_refusal(path: Path, code: str, message: str) -> None:
    with pytest.raises(MbcError, match=message) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)
    assert caught.value.remedy
    assert caught.value.code == code


def test_written_parts_are_read(path: Path) -> None:
    profile = read_profile(path)
    assert profile.identity == IDENTITY
    assert profile.cudnn == 91900
    assert profile.overhead_bytes == 300
    assert [c.time_us for c in profile.candidates(request())] == [10.0, 20.0]
    best = profile.candidates(request())[0]
    assert best == measurement(2, 10.0, 4096).candidate()
    assert best.measured
    assert profile.candidates(request(rows=16)) == ()
    assert [m.refused for m in profile.measurements[signature(request())]].count("wrong result") == 1


def test_nothing_but_the_file_is_left(path: Path) -> None:
    assert [p.name for p in path.parent.iterdir()] == ["p.sqlite"]


def test_a_request_is_replaced_as_a_whole(path: Path) -> None:
    with ProfileWriter(path, replace(IDENTITY, driver="590", date="2027-01-01")) as writer:
        assert writer.signatures() == {signature(request())}
        writer.record(request(), [measurement(3, 5.0)])
        writer.record(request(rows=2), [])
        assert len(writer.signatures()) == 2
    assert [c.settings[0] for c in read_profile(path).candidates(request())] == [("engine", 3)]


def test_a_failed_recording_changes_nothing(path: Path) -> None:
    def broken() -> Iterator[Measurement]:
        yield measurement(7, 1.0)
        raise RuntimeError("lost the GPU")

    with ProfileWriter(path, IDENTITY) as writer, pytest.raises(RuntimeError):
        writer.record(request(), broken())
    assert len(read_profile(path).candidates(request())) == 2


def test_signatures_tell_requests_apart() -> None:
    base = request()
    assert signature(base) == signature(request())
    others = [
        request(rows=9),
        replace(base, kind="convolution_backward_data"),
        replace(base, precision=Precision.TF32),
        replace(base, attributes=replace(base.attributes, stride=(2, 2))),
    ]
    assert len({signature(r) for r in (base, *others)}) == 5


def test_missing_file(tmp_path: Path) -> None:
    check_refusal(tmp_path / "none.sqlite", "MBC072", "cannot be opened or written")


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MbcError, match="cannot be opened or written") as caught:
        ProfileWriter(tmp_path / "file" / "p.sqlite", IDENTITY)
    assert caught.value.code == "MBC072"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_file(path: Path) -> None:
    path.chmod(0o444)
    with pytest.raises(MbcError) as caught, ProfileWriter(path, IDENTITY) as writer:
        writer.record(request(), [])
    assert caught.value.code == "MBC072"


def test_not_a_database(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    path.write_bytes(b"not a database at all" * 100)
    check_refusal(path, "MBC073", "is not a profile of mbc, or is damaged")


def test_another_database(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    check_refusal(path, "MBC073", "is not a profile of mbc, or is damaged")


def test_damaged_file(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(data)
    check_refusal(path, "MBC073", "is not a profile of mbc, or is damaged")


def test_cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])
    check_refusal(path, "MBC073", "is not a profile of mbc, or is damaged")


def test_values_that_make_no_sense(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE candidate SET layouts = 'sideways'")
    connection.close()
    check_refusal(path, "MBC073", "is not a profile of mbc, or is damaged")


def test_locked_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mbc.profile.read_profile.WAIT_S", 0.01)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        check_refusal(path, "MBC074", "is in use by another process")
    finally:
        holder.close()


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_another_schema(path: Path, version: int) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    check_refusal(path, "MBC075", f"has schema version {version}, but this mbc reads version {SCHEMA_VERSION}")
    with pytest.raises(MbcError, match=f"has schema version {version}") as caught:
        ProfileWriter(path, IDENTITY)
    assert caught.value.code == "MBC075" and "mbc profile" in caught.value.remedy


def test_reading_takes_no_lock_from_a_writer_of_the_same_process(path: Path):
    """POSIX locks of a file are released when a process closes any descriptor of the file."""
    log = path.with_name(path.name + "-wal")
    another = f"""
        from pathlib import Path
        from mbc.profile.writer import ProfileWriter
        from tests.profile.test_model import IDENTITY
        with ProfileWriter(Path({str(path)!r}), IDENTITY):
            pass
    """
    with ProfileWriter(path, IDENTITY) as writer:
        read_profile(path)
        subprocess.run([sys.executable, "-c", textwrap.dedent(another)], check=True, cwd=ROOT)
        assert log.exists(), "the other process was not the last to have the file open"
        writer.record(request(rows=2), [])
    assert len(read_profile(path).extents) == 2 and not log.exists()


def test_a_log_that_two_writers_left_to_each_other_is_folded(path: Path):
    first, second = ProfileWriter(path, IDENTITY), ProfileWriter(path, IDENTITY)
    first.close()
    second._connection.close()  # as if it had tried to fold the log while the first was open
    fold_log(path)
    assert len(read_profile(path).extents) == 1
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    fold_log(path.with_name("none"))
    assert not path.with_name("none").exists()


@pytest.mark.parametrize("change", [{"gpu": "Another GPU"}, {"multiprocessors": 66}, {"cudnn": 92800}])
def test_times_of_two_machines_are_never_mixed(path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(MbcError, match="never mixed") as caught:
        ProfileWriter(path, replace(IDENTITY, **change))
    assert caught.value.code == "MBC076"


def test_a_profile_is_read_anew_only_when_it_changed(path: Path) -> None:
    before = read_profile(path)
    assert read_profile(path) is before
    with ProfileWriter(path, IDENTITY) as writer:
        writer.record(request(rows=16), [measurement(1, 40.0)])
        assert read_profile(path).candidates(request(rows=16))  # while it is still being written
    after = read_profile(path)
    assert after.candidates(request(rows=16)) and not before.candidates(request(rows=16))
    assert read_profile(path) is after


def test_a_profile_calibrates_the_overhead(path: Path) -> None:
    assert calibrated(GPU, None) == GPU
    assert calibrated(GPU, read_profile(path)).overhead_bytes == 300


def test_a_plan_reserves_the_overhead_of_its_profile(path: Path) -> None:
    text = (
        "network n(batch = 2) { input x[batch, 3] : float  y = x |> linear(3)  output y  loss (y, x) |> mse }\n"
        "memory { device = 1 GB }"
    )
    plan = compile_plan(Source("n.mbc", text), Options(gpu="h200", profile=str(path)))
    assert plan.predictions.overhead_bytes == 300 and plan.predictions.overhead_measured
    assert plan.target.profile == "NVIDIA H200, driver 580.1, cuDNN 9.19.0, 2026-11-21"
    assert load_plan(dump_plan(plan), "plan.json").target == plan.target


def test_a_change_that_a_kill_left_half_done_is_undone(path: Path, tmp_path: Path):
    """Readers open the file for reading only, so they cannot roll back themselves."""
    with ProfileWriter(path, IDENTITY) as writer:
        writer.record(request(rows=2), [])
    extents = read_profile(path).extents
    left = tmp_path / "left.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as killed:
        killed.execute("PRAGMA cache_size = 1")  # what changes is written before the transaction ends
        killed.execute("BEGIN IMMEDIATE")
        killed.execute("DELETE FROM request")
        killed.executemany("INSERT INTO constant VALUES (?, 1)", ((f"{'x' * 500}{number}",) for number in range(100)))
        for end in ("", "-journal"):
            shutil.copy(f"{path}{end}", f"{left}{end}")
        killed.execute("ROLLBACK")
    assert read_profile(left).extents == extents
    assert not Path(f"{left}-journal").exists()
