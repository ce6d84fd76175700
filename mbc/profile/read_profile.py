"""Reads a profile from its SQLite file (`mbc.profile.schema`), compressed or not."""

from __future__ import annotations

import gzip
import io
import os
import sqlite3
import zlib
from contextlib import closing
from functools import lru_cache
from pathlib import Path

from mbc.errors import MbcError
from mbc.files import check_file, read_file
from mbc.hardware.collective_times import CollectiveKind, CollectiveSlowdown, CollectiveTime, ConcurrentKernel, Link
from mbc.profile.check_file import check_contents, check_structure, guard
from mbc.profile.kernel_versions import current
from mbc.profile.model import LEFT_TO_ESTIMATE, Extent, Overhead, Profile
from mbc.profile.paths import COMPRESSED
from mbc.profile.rows import LazyMeasurements
from mbc.profile.schema import COLUMNS, Row, check_rows, check_version, damaged, explained, identity_of
from mbc.units import show_size

WAIT_S = 5.0  # longest wait for another process that locks the file
MOST_BYTES = 1 << 29  # largest profile, compressed or not: that of the examples takes 40 MB


def read_profile(path: Path) -> Profile:
    """Return the whole profile; an unchanged file is read only once.

    Times of kernels that were rewritten since count as estimates.

    Raises:
        MbcError: MBC072, the file cannot be read; MBC073, it is damaged or not a profile; MBC074, it is in use; MBC075,
            its schema version is not supported.
    """
    state = _state(path)
    return _read(path) if state is None else _read_once(path, state)


def _state(path: Path) -> tuple[int | bytes, ...] | None:
    """Return a value that changes whenever the file does, or None while others write to a log beside it."""
    log = path.parent / f"{path.name}-wal"
    if log.exists():  # checked first: closing the file would drop the locks that a writer in this process has on it
        return None
    try:
        check_file(path.stat(), MOST_BYTES)
        with path.open("rb") as file:
            header, status = file.read(100), os.fstat(file.fileno())  # the header counts changes: times may be coarse
    except OSError:
        return None
    if log.exists():
        return None
    return header, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=4)
def _read_once(path: Path, state: tuple[int | bytes, ...]) -> Profile:
    return _read(path)


def _read(path: Path) -> Profile:
    with explained(path), closing(_opened(path)) as connection:
        identity = identity_of(connection, path)
        try:
            signatures: dict[int, str] = dict(connection.execute("SELECT id, signature FROM request"))
            rows: dict[str, list[Row]] = {}
            for request, *row in connection.execute(f"SELECT request, {COLUMNS} FROM candidate ORDER BY request"):
                if request in signatures:
                    rows.setdefault(signatures[request], []).append(tuple(row))
            check_rows([row for of_request in rows.values() for row in of_request])
            overheads = tuple(
                Overhead(*row) for row in connection.execute("SELECT what, subject, size_bytes FROM overhead")
            )
            columns = "signature, workspace_limit_bytes, left_out, date, micro_batches_only"
            limits = connection.execute(f"SELECT {columns} FROM request")
            extents = {key: Extent(*row, micro_batches_only=bool(only)) for key, *row, only in limits}
            marked = frozenset(key for key, extent in extents.items() if extent.left_out == LEFT_TO_ESTIMATE)
            constants: dict[str, float] = dict(connection.execute("SELECT name, value FROM constant"))
            times = tuple(
                CollectiveTime(CollectiveKind(kind), ranks, Link(link), *rest)
                for kind, ranks, link, *rest in connection.execute("SELECT * FROM collectives")
            )
            slowdowns = tuple(
                CollectiveSlowdown(ConcurrentKernel(kernel), ranks, Link(link), *rest)
                for kernel, ranks, link, *rest in connection.execute("SELECT * FROM collective_slowdowns")
            )
        except (ValueError, TypeError) as error:
            raise damaged(path, error) from error
    measurements = LazyMeasurements(rows)
    return current(
        Profile(
            identity,
            measurements,
            overheads,
            str(path),
            {key: extent for key, extent in extents.items() if key not in marked},
            constants,
            collectives=times,
            collective_slowdowns=slowdowns,
            left_to_estimate=marked.difference(rows),
        )
    )


def _opened(path: Path) -> sqlite3.Connection:
    try:
        return _checked(path)
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorname", "") != "SQLITE_READONLY_ROLLBACK":
            raise
    # A writer was killed while it changed the file itself: opening the file for writing undoes the change.
    with closing(sqlite3.connect(path, timeout=WAIT_S)) as connection:
        guard(connection)
        connection.execute("PRAGMA user_version")
    return _checked(path)


def _checked(path: Path) -> sqlite3.Connection:
    """Return a connection to the profile after its version, structure and contents were checked."""
    connection = _file(path)
    try:
        guard(connection)
        check_version(connection, path)
        check_structure(connection, path)
        check_contents(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _file(path: Path) -> sqlite3.Connection:
    try:
        if path.suffix != COMPRESSED:
            check_file(path.stat(), MOST_BYTES)
            return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=WAIT_S)
        # A compressed file may have any content: no more is decompressed than a profile can have.
        data = gzip.GzipFile(fileobj=io.BytesIO(read_file(path, MOST_BYTES))).read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise EOFError(f"decompressed, it has more than {show_size(MOST_BYTES)}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise damaged(path, error) from error
    except OSError as error:
        raise MbcError(
            "MBC072", f"the profile '{path}' cannot be opened or written: {error}", "check the path and its permissions"
        ) from error
    connection = sqlite3.connect(":memory:")
    connection.deserialize(data)  # data that are not a database give an error at the first query
    return connection
