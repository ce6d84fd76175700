"""Profiles of unknown origin: an invalid row is refused at once and named, and no code of the file runs."""

from __future__ import annotations

import gzip
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from mbc.errors import MbcError
from mbc.profile import check_file as check
from mbc.profile.read_profile import read_profile
from mbc.profile.schema import SCHEMA
from mbc.profile.writer import ProfileWriter
from tests.profile.profiles import IDENTITY, measurement, request


def changed(tmp_path: Path, *statements: str) -> Path:
    path = tmp_path / "p.sqlite"
    with ProfileWriter(path, IDENTITY) as writer:
        writer.record(request(), [measurement(1, 20.0), measurement(2, 10.0, 4096)])
        writer.record_constant("graph_gap_us", 1.25)
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    return path


def refused(path: Path, code: str = "MBC073") -> str:
    with pytest.raises(MbcError) as caught:
        read_profile(path)
    assert caught.value.code == code and str(path) in caught.value.message
    return caught.value.message


def test_measurements_are_read(tmp_path: Path) -> None:
    assert read_profile(changed(tmp_path)).measurements


VALUES = {
    "UPDATE constant SET value = -1": "value of 'graph_gap_us' in its table 'constant'",
    "UPDATE constant SET value = 'abc'": "value of 'graph_gap_us'",
    "UPDATE constant SET value = 9e999": "value of 'graph_gap_us'",
    "UPDATE candidate SET time_us = -0.5": "time_us of 'cudnn/",
    "UPDATE candidate SET time_us = x'00'": "time_us of 'cudnn/",
    "UPDATE candidate SET workspace_bytes = -1": "workspace_bytes of 'cudnn/",
    "UPDATE candidate SET workspace_bytes = 0.5": "workspace_bytes of 'cudnn/",
    "UPDATE candidate SET deterministic = 'yes'": "deterministic of 'cudnn/",
    "UPDATE candidate SET notes = x'ff'": "notes of 'cudnn/",
    "UPDATE request SET workspace_limit_bytes = 9223372036854775807": "workspace_limit_bytes of '",
    "UPDATE identity SET value = x'00' WHERE key = 'gpu'": "value of 'gpu' in its table 'identity'",
    "INSERT INTO overhead VALUES ('context', '', -5)": "size_bytes of 'context of ' in its table 'overhead'",
    "INSERT INTO collectives VALUES ('all_reduce', 1, 'nvlink', 8, 4, 1.0, 1.0)": "ranks of 'all_reduce of 4 bytes'",
    "INSERT INTO collectives VALUES ('all_reduce', 2, 'nvlink', 8, 4, -1.0, 1.0)": "time_us of 'all_reduce of 4 bytes'",
    "INSERT INTO collective_slowdowns VALUES ('gemm', 2, 'nvlink', 8, 'x', 1.0)": "kernel_ratio of 'gemm, 8 thread",
}


@pytest.mark.parametrize("statement", VALUES)
def test_a_value_out_of_its_range_is_named(tmp_path: Path, statement: str) -> None:
    assert VALUES[statement] in refused(changed(tmp_path, statement))


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"
STRUCTURES = {
    "a view": ("DROP TABLE constant", f"CREATE VIEW constant AS {ENDLESS} 'x' AS name, i AS value FROM n"),
    "a view of its own": ("CREATE VIEW more AS SELECT 1",),
    "a trigger": ("CREATE TRIGGER t AFTER UPDATE ON request BEGIN DELETE FROM candidate; END",),
    "an index": ("CREATE INDEX more ON candidate (abs(time_us))",),
    "a computed column": ("ALTER TABLE constant ADD COLUMN more AS (abs(value))",),
    "another column": ("ALTER TABLE constant ADD COLUMN more",),
    "no table": ("DROP TABLE candidate",),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_tables_of_a_profile_and_nothing_else(tmp_path: Path, name: str) -> None:
    message = refused(changed(tmp_path, *STRUCTURES[name]))
    assert any(why in message for why in ("is damaged: there is a", "is damaged: its table"))


def test_a_query_that_goes_on_for_ever_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "STEPS", 10)
    monkeypatch.setattr(check, "MOST_STEPS", 2)
    assert "interrupted" in refused(changed(tmp_path))


def fifo(path: Path) -> None:
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def endless(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("name", ["p.sqlite", "p.sqlite.gz"])
@pytest.mark.parametrize("make", [fifo, zeros, folder, endless], ids=lambda make: make.__name__)
def test_special_files_are_not_waited_for(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    make(tmp_path / name)
    message = refused(tmp_path / name, "MBC072")
    assert any(why in message for why in ("not a regular file", "a folder", "Is a directory", "but at most"))


def test_a_packed_profile_unpacks_to_no_more_than_one_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mbc.profile.read_profile.MOST_BYTES", 1 << 20)
    (tmp_path / "p.sqlite.gz").write_bytes(gzip.compress(bytes(1 << 21)))
    assert "decompressed, it has more than 1.00 MiB" in refused(tmp_path / "p.sqlite.gz")


def test_a_value_has_no_more_bytes_than_a_profile_needs(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    with ProfileWriter(path, IDENTITY):
        pass
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO constant VALUES (?, 1)", ("n" * (2 * check.MOST_VALUE_BYTES),))
    connection.close()
    assert "too big" in refused(path)


def test_every_column_has_a_rule(tmp_path: Path) -> None:
    """Every column has a rule, except columns of words that reading looks up."""
    looked_up = {"kind", "link", "kernel", "key"}
    with ProfileWriter(tmp_path / "p.sqlite", IDENTITY):
        pass
    with sqlite3.connect(tmp_path / "p.sqlite") as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        columns = {(t, row[1]) for t in tables for row in connection.execute(f"PRAGMA table_info({t})")}
    connection.close()
    assert len(tables) == SCHEMA.count("CREATE TABLE")
    ruled = {(table, column) for table, (_, rules) in check._RULES.items() for column in rules}
    assert {pair for pair in columns - ruled if pair[1] not in looked_up} == set()


@pytest.mark.parametrize("during", ["a function", "a look at the count"])
def test_an_interrupt_while_a_profile_is_read_is_one(during: str, tmp_path: Path, monkeypatch) -> None:
    """Ctrl-C arrives while SQLite calls Python. SQLite replaces the exception by an error of its own."""
    path = changed(tmp_path)
    if during == "a function":
        monkeypatch.setattr(check, "_plain", _interrupted)
    else:
        monkeypatch.setattr(check, "STEPS", 1)
        monkeypatch.setattr(check, "MOST_STEPS", _Interrupting())
    with pytest.raises(KeyboardInterrupt):
        read_profile(path)
    monkeypatch.undo()
    assert read_profile(path).measurements


def _interrupted(text: object = None) -> bool:
    raise KeyboardInterrupt


class _Interrupting:
    def __lt__(self, other: object) -> bool:
        return _interrupted()
