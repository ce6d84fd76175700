"""Adds to a profile in its SQLite file: the rows of a request are written together or not at all."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Generator, Iterable
from contextlib import closing, contextmanager
from dataclasses import astuple, fields
from datetime import UTC, datetime
from pathlib import Path

from mbc.errors import MbcError
from mbc.hardware.collective_times import CollectiveSlowdown, CollectiveTime
from mbc.kernels.base import Request
from mbc.profile.check_file import check_structure
from mbc.profile.model import WHOLE_EXTENT, Extent, Identity, Measurement, Overhead
from mbc.profile.paths import COMPRESSED
from mbc.profile.schema import (
    APPLICATION_ID,
    COLUMNS,
    SCHEMA,
    SCHEMA_VERSION,
    check_version,
    explained,
    identity_of,
    is_busy,
    row_of,
    statements,
)
from mbc.profile.signature import rows_of, signature

WAIT_S = 60.0  # longest wait for other processes that write: several GPUs may measure into one file


def fold_log(path: Path) -> None:
    """Merge a profile's write-ahead log into its file, if the file exists and no process has it open.

    Two writers that close at the same time may each leave the log to the other. A reader would then create files beside
    the profile.
    """
    if path.exists():
        with explained(path), closing(sqlite3.connect(path, isolation_level=None)) as connection:
            _fold_log(connection)


def _fold_log(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        connection.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.OperationalError as error:
        if not is_busy(error):
            raise  # otherwise another process has the file open: the last one merges the log


class ProfileWriter:
    """Adds to a profile, and creates it if there is none.

    Use as a context manager: closing leaves one single file.
    """

    def __init__(self, path: Path, identity: Identity) -> None:
        """Open or create the file.

        Raises:
            MbcError: MBC072 to MBC075, as for `read_profile`; MBC076, the file is of another GPU or another cuDNN.
        """
        self.path = path
        if path.suffix == COMPRESSED:
            raise MbcError(
                "MBC072",
                f"the profile '{path}' is compressed by its name, so nothing can be added to it",
                "measure into a .sqlite file, and compress it with `mbc profile ship`",
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MbcError(
                "MBC072", f"the profile '{path}' cannot be opened or written: {error}", "choose another folder"
            ) from error
        with explained(path):
            self._connection = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)
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
                for statement in statements(SCHEMA):
                    self._connection.execute(statement)
                pairs = ((f.name, getattr(identity, f.name)) for f in fields(identity))
                self._connection.executemany("INSERT INTO identity VALUES (?, ?)", pairs)
                self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            check_version(self._connection, self.path)
            check_structure(self._connection, self.path)
            measured_on = identity_of(self._connection, self.path)
            if not measured_on.alike(identity):
                raise MbcError(
                    "MBC076",
                    f"the profile '{self.path}' was measured on {measured_on}, but this machine has {identity}",
                    "write to another file: times of two machines are never mixed",
                )

    def _follow_log(self) -> None:
        """Write through a write-ahead log, so that readers never wait while measurements are added.

        If the process is killed, the next one that opens the file merges the log. `close` merges the log into the file.
        """
        patient_until_s = time.monotonic() + WAIT_S
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                # SQLite itself does not wait when two processes create one file at the same time.
                if not is_busy(error) or time.monotonic() > patient_until_s:
                    raise
                time.sleep(0.01)

    @contextmanager
    def _transaction(self) -> Generator[None, None, None]:
        if self._connection.in_transaction:  # within `all_at_once`
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
        """Write everything recorded in the body together, or nothing."""
        with explained(self.path), self._transaction():
            yield

    def signatures(self) -> frozenset[str]:
        """Return the signatures of all requests in the file, which a resumed run leaves out."""
        with explained(self.path):
            return frozenset(row[0] for row in self._connection.execute("SELECT signature FROM request"))

    def record(self, request: Request, measurements: Iterable[Measurement], extent: Extent = WHOLE_EXTENT) -> None:
        """Replace all measurements of `request`."""
        self.record_signature(signature(request), rows_of(request), measurements, extent)

    def record_signature(
        self, key: str, rows: int, measurements: Iterable[Measurement], extent: Extent = WHOLE_EXTENT
    ) -> None:
        """Replace all measurements of the request with signature `key` and `rows` rows."""
        with explained(self.path), self._transaction():
            connection = self._connection
            connection.execute(
                "INSERT INTO request (signature, row_count, workspace_limit_bytes, left_out, date, micro_batches_only) "
                "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET workspace_limit_bytes = "
                "excluded.workspace_limit_bytes, left_out = excluded.left_out, date = excluded.date, "
                "micro_batches_only = excluded.micro_batches_only",
                (
                    key,
                    rows,
                    extent.workspace_limit_bytes,
                    extent.left_out,
                    extent.date or _now(),
                    int(extent.micro_batches_only),
                ),
            )
            identity = connection.execute("SELECT id FROM request WHERE signature = ?", (key,)).fetchone()[0]
            connection.execute("DELETE FROM candidate WHERE request = ?", (identity,))
            places = ", ".join("?" * 15)
            connection.executemany(
                f"INSERT OR REPLACE INTO candidate (request, {COLUMNS}) VALUES ({places})",
                ((identity, *row_of(m)) for m in measurements),
            )

    def record_constant(self, name: str, value: float) -> None:
        """Write a constant of the machine."""
        with explained(self.path), self._transaction():
            self._connection.execute("INSERT OR REPLACE INTO constant VALUES (?, ?)", (name, value))

    def record_overhead(self, overhead: Overhead) -> None:
        """Write device memory in use outside the arena."""
        with explained(self.path), self._transaction():
            self._connection.execute("INSERT OR REPLACE INTO overhead VALUES (?, ?, ?)", astuple(overhead))

    def record_collectives(self, times: Iterable[CollectiveTime], slowdowns: Iterable[CollectiveSlowdown]) -> None:
        """Add measurements of collectives; they replace those with the same key."""
        with explained(self.path), self._transaction():
            for table, rows in (("collectives", times), ("collective_slowdowns", slowdowns)):
                values = [astuple(row) for row in rows]
                if values:
                    places = ", ".join("?" * len(values[0]))
                    self._connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({places})", values)

    def close(self) -> None:
        """Merge the log into the file and close it."""
        with explained(self.path), closing(self._connection):
            _fold_log(self._connection)

    def __enter__(self) -> ProfileWriter:
        """Return this writer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S")
