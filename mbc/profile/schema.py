"""The SQLite schema of a profile: tables, rows, and validation."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from mbc.errors import MbcError
from mbc.ir.types import Layout
from mbc.profile.model import Identity, Measurement

_P = ParamSpec("_P")
_T = TypeVar("_T")
APPLICATION_ID = 0x6D626370  # "mbcp", in the header of the file
SCHEMA_VERSION = 6

SCHEMA = """
CREATE TABLE identity (key TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
CREATE TABLE request (
  id INTEGER PRIMARY KEY,
  signature TEXT NOT NULL UNIQUE,
  row_count INTEGER NOT NULL,
  workspace_limit_bytes INTEGER NOT NULL,  -- candidates that need more were not measured
  left_out TEXT NOT NULL,       -- what else was not, in words
  micro_batches_only INTEGER NOT NULL DEFAULT 0,  -- what a micro-batch gains nothing by was left out, too
  date TEXT NOT NULL DEFAULT '' -- of the measurement, UTC, YYYY-MM-DDTHH:MM:SS
);
CREATE TABLE candidate (
  request INTEGER NOT NULL REFERENCES request(id),
  provider TEXT NOT NULL,
  name TEXT NOT NULL,
  settings TEXT NOT NULL,       -- JSON, [[name, value], ...]
  layouts TEXT NOT NULL,        -- of inputs and outputs, comma separated
  workspace_bytes INTEGER NOT NULL,
  time_us REAL NOT NULL,        -- median
  spread_us REAL NOT NULL,      -- between the quartiles
  deterministic INTEGER NOT NULL,
  accumulates INTEGER NOT NULL,
  notes TEXT NOT NULL,          -- numerical and behaviour notes, comma separated
  error REAL NOT NULL,          -- normalised L2 against the reference, negative when unknown
  refused TEXT NOT NULL,        -- why it must not be used, empty when it may
  accumulate_us REAL NOT NULL,  -- median when it adds to its output, 0 when that was not measured
  dominated INTEGER NOT NULL,   -- run once only
  PRIMARY KEY (request, provider, name, settings, layouts)
) WITHOUT ROWID;
CREATE TABLE overhead (what TEXT NOT NULL, subject TEXT NOT NULL, size_bytes INTEGER NOT NULL,
  PRIMARY KEY (what, subject)) WITHOUT ROWID;
CREATE TABLE constant (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE collectives (
  kind TEXT NOT NULL,           -- all_reduce, reduce_scatter, all_gather
  ranks INTEGER NOT NULL,
  link TEXT NOT NULL,           -- nvlink, pcie, shared_memory, socket
  max_ctas INTEGER NOT NULL,    -- thread blocks of a collective at most
  bytes INTEGER NOT NULL,       -- of the whole buffer of one rank
  time_us REAL NOT NULL,        -- median, of each of several one after another
  single_us REAL NOT NULL,      -- median, of one on idle GPUs
  PRIMARY KEY (kind, ranks, link, max_ctas, bytes)
) WITHOUT ROWID;
CREATE TABLE collective_slowdowns (
  kernel TEXT NOT NULL,         -- convolution, gemm, elementwise, reduction
  ranks INTEGER NOT NULL,
  link TEXT NOT NULL,
  max_ctas INTEGER NOT NULL,
  kernel_ratio REAL NOT NULL,   -- time of the kernel beside all-reduces over its time alone
  collective_ratio REAL NOT NULL, -- and of the all-reduces beside such kernels
  PRIMARY KEY (kernel, ranks, link, max_ctas)
) WITHOUT ROWID;
"""
Row = tuple[Any, ...]  # of a candidate: COLUMNS
Kernel = tuple[str, str, tuple[tuple[str, int], ...]]  # provider, name, settings
COLUMNS = (
    "provider, name, settings, layouts, workspace_bytes, time_us, spread_us, deterministic, accumulates, notes, "
    "error, refused, accumulate_us, dominated"
)


def statements(script: str) -> list[str]:
    """Return the statements of an SQL script."""
    return [statement for statement in script.split(";") if statement.strip()]


def is_busy(error: sqlite3.Error) -> bool:
    """Return whether another process holds the file."""
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def damaged(path: Path, reason: object, remedy: str = "give a profile; if the file was one, measure again") -> MbcError:
    """Return the error MBC073 for a file that is damaged or not a profile."""
    return MbcError("MBC073", f"'{path}' is not a profile of mbc, or is damaged: {reason}", remedy)


# Exceptions of callbacks within `explained`: SQLite itself reports only that there was one.
_raised: ContextVar[list[BaseException]] = ContextVar("_raised")


def callback(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a function for SQLite to call; `explained` raises its exceptions again, Ctrl-C included."""

    @wraps(function)
    def called(*arguments: _P.args, **named: _P.kwargs) -> _T:
        try:
            return function(*arguments, **named)
        except BaseException as error:
            _raised.get([]).append(error)
            raise

    return called


@contextmanager
def explained(path: Path) -> Generator[None, None, None]:
    """Turn errors of SQLite in the body into errors that a user can act on.

    Raises:
        MbcError: MBC072, the file cannot be opened or written; MBC073, it is damaged; MBC074, it is in use.
    """
    raised: list[BaseException] = []
    outer = _raised.set(raised)
    try:
        yield
    except UnicodeDecodeError as error:  # of a message with names of the file's tables
        raise damaged(path, "names in it are not UTF-8") from error
    except sqlite3.Error as error:
        if raised:
            raise raised[0] from None
        name: str = getattr(error, "sqlite_errorname", "")
        if is_busy(error):
            raise MbcError(
                "MBC074", f"the profile '{path}' is in use by another process", "wait until it has finished measuring"
            ) from error
        if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_FULL", "SQLITE_IOERR")):
            raise MbcError(
                "MBC072",
                f"the profile '{path}' cannot be opened or written: {error}",
                "check the path, its permissions and the free space",
            ) from error
        raise damaged(path, error) from error
    finally:
        _raised.reset(outer)


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    """Raise MBC073 unless the database is a profile, and MBC075 unless it has today's schema version."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise damaged(path, "it is another database", "give a profile")
    if version != SCHEMA_VERSION:
        raise MbcError(
            "MBC075",
            f"the profile '{path}' has schema version {version}, but this mbc reads version {SCHEMA_VERSION}",
            "measure again with `mbc profile`, or use the mbc that wrote it",
        )


def identity_of(connection: sqlite3.Connection, path: Path) -> Identity:
    """Return the identity that a profile's file has."""
    values: dict[str, Any] = dict(connection.execute("SELECT key, value FROM identity"))
    names = {f.name for f in fields(Identity)}
    if set(values) != names:
        raise damaged(path, "identity")
    return Identity(**values)


# A profile has thousands of rows and few different settings and layouts.
@lru_cache(maxsize=1024)
def _settings_in(text: str) -> tuple[tuple[str, int], ...]:
    return tuple((str(key), int(value)) for key, value in json.loads(text))


@lru_cache(maxsize=1024)
def _layouts(text: str) -> tuple[Layout, ...]:
    return tuple(Layout(layout) for layout in text.split(","))


def kernel_of(row: Row) -> Kernel:
    """Return the kernel of a row."""
    provider, name, settings = row[:3]
    return provider, name, _settings_in(settings)


def check_rows(rows: Collection[Row]) -> None:
    """Check that `measurement_of` can decode the rows, whose values have the types of their columns.

    Raises:
        ValueError: A setting or layout is invalid.
        TypeError: A setting is invalid.
    """
    for text in {row[2] for row in rows}:
        _settings_in(text)
    for layout in {layout for text in {row[3] for row in rows} for layout in text.split(",")}:
        Layout(layout)


def measurement_of(row: Row) -> Measurement:
    """Return the measurement of a row."""
    provider, name, settings, layouts, workspace, time_us, spread_us, fixed, adds, notes, error, refused, *more = row
    adding_us, once = more
    return Measurement(
        provider,
        name,
        _settings_in(settings),
        _layouts(layouts),
        workspace,
        time_us,
        spread_us,
        bool(fixed),
        bool(adds),
        tuple(notes.split(",")) if notes else (),
        error,
        refused,
        adding_us,
        bool(once),
    )


def row_of(m: Measurement) -> Row:
    """Return a measurement as a row."""
    return (
        m.provider,
        m.name,
        json.dumps(m.settings, separators=(",", ":")),
        ",".join(m.layouts),
        m.workspace_bytes,
        m.time_us,
        m.spread_us,
        m.deterministic,
        m.accumulates,
        ",".join(m.notes),
        m.error,
        m.refused,
        m.accumulate_us,
        m.dominated,
    )
