"""A profile as an SQLite file: one row a candidate, a request's rows written together or not at all."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
import time
import zlib
from collections.abc import Generator, Iterable
from contextlib import closing, contextmanager
from dataclasses import astuple, fields
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

from mbc.device.editions import current
from mbc.device.profile import Extent, Identity, Measurement, Overhead, Profile
from mbc.device.signature import rows_of, signature
from mbc.errors import MbcError
from mbc.ir.types import Layout
from mbc.kernels.base import Request

APPLICATION_ID = 0x6D626370  # "mbcp", in the header of the file
SCHEMA_VERSION = 4
OLDEST_VERSION = 2  # that is still read; it lacks the dates of requests
DATED_VERSION = 3  # it lacks `for_parts`, and says it in words
WHOLE_EXTENT = Extent(1 << 62)  # everything was looked for
COMPRESSED = ".gz"  # end of the name of a file that is packed: it can be read, but not added to
WAIT_S = 5.0  # for another process that holds the file
WRITER_WAIT_S = 60.0  # several GPUs may measure into one file

_SCHEMA = """
CREATE TABLE identity (key TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
CREATE TABLE request (
  id INTEGER PRIMARY KEY,
  signature TEXT NOT NULL UNIQUE,
  row_count INTEGER NOT NULL,
  workspace_limit_bytes INTEGER NOT NULL,  -- candidates that need more were not measured
  left_out TEXT NOT NULL,       -- what else was not, in words
  for_parts INTEGER NOT NULL DEFAULT 0,  -- what a micro-batch gains nothing by was left out, too
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
"""
_SAYS_FOR_PARTS = "left_out LIKE '%were dominated at%' OR left_out LIKE '%gain nothing from sizes below%'"
_COLUMNS = (
    "provider, name, settings, layouts, workspace_bytes, time_us, spread_us, deterministic, accumulates, notes, "
    "error, refused, accumulate_us, dominated"
)


def _is_busy(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


@contextmanager
def _explained(path: Path) -> Generator[None, None, None]:
    """Turn what SQLite says into what a user can act on."""
    try:
        yield
    except sqlite3.Error as error:
        name: str = getattr(error, "sqlite_errorname", "")
        if _is_busy(error):
            raise MbcError(
                "MBC074",
                f"the profile '{path}' is in use by another process",
                "wait until it has finished measuring",
            ) from error
        if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_FULL", "SQLITE_IOERR")):
            raise MbcError(
                "MBC072",
                f"the profile '{path}' cannot be opened or written: {error}",
                "check the path, its permissions and the free space",
            ) from error
        raise MbcError(
            "MBC073", f"'{path}' is not a profile of mbc, or is damaged: {error}", "delete it and measure again"
        ) from error


def _check(connection: sqlite3.Connection, path: Path) -> int:
    """The file's schema version, when it is one that can be read."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise MbcError(
            "MBC073", f"'{path}' is not a profile of mbc, or is damaged: it is another database", "name a profile"
        )
    if not OLDEST_VERSION <= version <= SCHEMA_VERSION:
        raise MbcError(
            "MBC075",
            f"the profile '{path}' has schema version {version}, this mbc reads version {SCHEMA_VERSION}",
            "measure again, or use the mbc that wrote it",
        )
    return version


def _identity(connection: sqlite3.Connection, path: Path) -> Identity:
    values: dict[str, Any] = dict(connection.execute("SELECT key, value FROM identity"))
    names = {f.name for f in fields(Identity)}
    if set(values) != names:
        raise MbcError(
            "MBC073", f"'{path}' is not a profile of mbc, or is damaged: identity", "delete it and measure again"
        )
    return Identity(**values)


# A profile has thousands of rows and few different settings and layouts.
@lru_cache(maxsize=1024)
def _settings(text: str) -> tuple[tuple[str, int], ...]:
    return tuple((str(key), int(value)) for key, value in json.loads(text))


@lru_cache(maxsize=1024)
def _layouts(text: str) -> tuple[Layout, ...]:
    return tuple(Layout(layout) for layout in text.split(","))


def _measurement(row: tuple[Any, ...]) -> Measurement:
    provider, name, settings, layouts, workspace, time_us, spread_us, fixed, adds, notes, error, refused, *more = row
    adding_us, once = more
    return Measurement(
        provider,
        name,
        _settings(settings),
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


def _row(m: Measurement) -> tuple[Any, ...]:
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


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S")


def read_profile(path: Path) -> Profile:
    """The whole profile, read once while the file stays as it is; times of kernels that were rewritten since count as
    estimates. MBC072 unreadable, MBC073 damaged or no profile, MBC074 in use, MBC075 another schema."""
    state = _state(path)
    return _read(path) if state is None else _read_once(path, state)


def _state(path: Path) -> tuple[int | bytes, ...] | None:
    """What changes whenever the file does, or None while that cannot be told: others are writing to a log beside it."""
    log = path.with_name(path.name + "-wal")
    if log.exists():  # asked first: closing the file would drop the locks that a writer in this process has on it
        return None
    try:
        with path.open("rb") as file:
            header, status = file.read(100), os.fstat(file.fileno())  # the header counts changes: stamps may be coarse
    except OSError:
        return None
    if log.exists():
        return None
    return header, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=4)
def _read_once(path: Path, state: tuple[int | bytes, ...]) -> Profile:
    return _read(path)


def _read(path: Path) -> Profile:
    with _explained(path), closing(_opened(path)) as connection:
        version = _check(connection, path)
        date = "date" if version >= DATED_VERSION else "''"
        for_parts = "for_parts" if version > DATED_VERSION else f"({_SAYS_FOR_PARTS})"
        identity = _identity(connection, path)
        measurements: dict[str, list[Measurement]] = {}
        query = f"SELECT signature, {_COLUMNS} FROM candidate JOIN request ON request = id ORDER BY id"
        try:
            for key, *row in connection.execute(query):
                measurements.setdefault(key, []).append(_measurement(tuple(row)))
            overheads = tuple(
                Overhead(*row) for row in connection.execute("SELECT what, subject, size_bytes FROM overhead")
            )
            columns = f"signature, workspace_limit_bytes, left_out, {date}, {for_parts}"
            rows = connection.execute(f"SELECT {columns} FROM request")
            extents = {key: Extent(*row, for_parts=bool(parts)) for key, *row, parts in rows}
            constants: dict[str, float] = dict(connection.execute("SELECT name, value FROM constant"))
        except (ValueError, TypeError) as error:
            raise MbcError(
                "MBC073", f"'{path}' is not a profile of mbc, or is damaged: {error}", "delete it and measure again"
            ) from error
    found = {key: tuple(rows) for key, rows in measurements.items()}
    return current(Profile(identity, found, overheads, str(path), extents, constants))


def _opened(path: Path) -> sqlite3.Connection:
    if path.suffix != COMPRESSED:
        return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=WAIT_S)
    try:
        data = gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise MbcError(
            "MBC073", f"'{path}' is not a profile of mbc, or is damaged: {error}", "delete it and measure again"
        ) from error
    except OSError as error:
        raise MbcError(
            "MBC072", f"the profile '{path}' cannot be opened or written: {error}", "check the path and its permissions"
        ) from error
    connection = sqlite3.connect(":memory:")
    connection.deserialize(data)  # whatever it is: what is no database is told when it is read
    return connection


def fold_log(path: Path) -> None:
    """Make one file of a profile, if there is one and nobody has it open: two writers that close at the same time may
    leave the log to each other, and whoever reads then leaves files beside the profile."""
    if path.exists():
        with _explained(path), closing(sqlite3.connect(path, isolation_level=None)) as connection:
            _fold_log(connection)


def _fold_log(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        connection.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.OperationalError as error:
        if not _is_busy(error):
            raise  # else another process has the file open: the last one folds the log


class ProfileWriter:
    """Adds to a profile, making it when there is none. Use as a context manager: closing leaves one single file.

    Raises MBC076 when the file is of another GPU or another cuDNN, and what `read_profile` raises.
    """

    def __init__(self, path: Path, identity: Identity) -> None:
        self.path = path
        if path.suffix == COMPRESSED:
            raise MbcError(
                "MBC072",
                f"the profile '{path}' is packed, or would be: it cannot be added to",
                "measure into a .sqlite, and pack that with mbc profile ship",
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MbcError(
                "MBC072", f"the profile '{path}' cannot be opened or written: {error}", "choose another folder"
            ) from error
        with _explained(path):
            self._connection = sqlite3.connect(path, timeout=WRITER_WAIT_S, isolation_level=None)
            try:
                self._open(identity)
            except BaseException:
                self._connection.close()
                raise

    def _open(self, identity: Identity) -> None:
        self._follow_log()
        with self._transaction():
            empty = not self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if empty:
                for statement in _SCHEMA.split(";"):
                    self._connection.execute(statement)
                pairs = ((f.name, getattr(identity, f.name)) for f in fields(identity))
                self._connection.executemany("INSERT INTO identity VALUES (?, ?)", pairs)
                self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            version = _check(self._connection, self.path)
            found = _identity(self._connection, self.path)
            if not found.alike(identity):
                raise MbcError(
                    "MBC076",
                    f"the profile '{self.path}' was measured on {found}, this is {identity}",
                    "write to another file: times of two machines are never mixed",
                )
            if version < DATED_VERSION:
                self._connection.execute("ALTER TABLE request ADD COLUMN date TEXT NOT NULL DEFAULT ''")
            if version < SCHEMA_VERSION:
                self._connection.execute("ALTER TABLE request ADD COLUMN for_parts INTEGER NOT NULL DEFAULT 0")
                self._connection.execute(f"UPDATE request SET for_parts = 1 WHERE {_SAYS_FOR_PARTS}")
                self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _follow_log(self) -> None:
        """Write through a log: readers are never kept waiting while measurements trickle in, and what a kill leaves is
        folded in by the next who opens the file. `close` folds the log into the file."""
        patient_until_s = time.monotonic() + WRITER_WAIT_S
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                # SQLite does not wait by itself when two processes make one file at the same time.
                if not _is_busy(error) or time.monotonic() > patient_until_s:
                    raise
                time.sleep(0.01)

    @contextmanager
    def _transaction(self) -> Generator[None, None, None]:
        if self._connection.in_transaction:  # of `all_at_once`
            yield
            return
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    @contextmanager
    def all_at_once(self) -> Generator[None, None, None]:
        """Everything recorded in the body is written together, or nothing of it."""
        with _explained(self.path), self._transaction():
            yield

    def known(self) -> frozenset[str]:
        """Signatures of the requests that have been measured: what a resumed run leaves out."""
        with _explained(self.path):
            return frozenset(row[0] for row in self._connection.execute("SELECT signature FROM request"))

    def record(self, request: Request, measurements: Iterable[Measurement], extent: Extent = WHOLE_EXTENT) -> None:
        """Replace everything known of `request`."""
        self.record_signature(signature(request), rows_of(request), measurements, extent)

    def record_signature(
        self, key: str, rows: int, measurements: Iterable[Measurement], extent: Extent = WHOLE_EXTENT
    ) -> None:
        with _explained(self.path), self._transaction():
            connection = self._connection
            connection.execute(
                "INSERT INTO request (signature, row_count, workspace_limit_bytes, left_out, date, for_parts) "
                "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET workspace_limit_bytes = "
                "excluded.workspace_limit_bytes, left_out = excluded.left_out, date = excluded.date, "
                "for_parts = excluded.for_parts",
                (
                    key,
                    rows,
                    extent.workspace_limit_bytes,
                    extent.left_out,
                    extent.date or _now(),
                    int(extent.for_parts),
                ),
            )
            identity = connection.execute("SELECT id FROM request WHERE signature = ?", (key,)).fetchone()[0]
            connection.execute("DELETE FROM candidate WHERE request = ?", (identity,))
            places = ", ".join("?" * 15)
            connection.executemany(
                f"INSERT OR REPLACE INTO candidate (request, {_COLUMNS}) VALUES ({places})",
                ((identity, *_row(m)) for m in measurements),
            )

    def record_constant(self, name: str, value: float) -> None:
        with _explained(self.path), self._transaction():
            self._connection.execute("INSERT OR REPLACE INTO constant VALUES (?, ?)", (name, value))

    def record_overhead(self, overhead: Overhead) -> None:
        with _explained(self.path), self._transaction():
            self._connection.execute("INSERT OR REPLACE INTO overhead VALUES (?, ?, ?)", astuple(overhead))

    def close(self) -> None:
        with _explained(self.path), closing(self._connection):
            _fold_log(self._connection)

    def __enter__(self) -> ProfileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
