"""Checks the file of a profile from elsewhere: it may have tables and values of a profile, and nothing that runs.

A database can have views and triggers, whose SQL runs when it is read or written, and any type in any column.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType

from mbc.profile.model import Identity
from mbc.profile.schema import SCHEMA, callback, damaged, statements
from mbc.source import visible

# Steps of SQLite's virtual machine between two checks, and the most checks that a query may take: the bundled profiles
# take under 100.
STEPS, MOST_STEPS = 100_000, 5_000
MOST_VALUE_BYTES = 1 << 24  # limit of a row: signatures of updates of all parameters take over 1 MiB
_MOST = 1 << 62
_COUNTS = ", ".join(f"'{field.name}'" for field in fields(Identity) if field.type == "int")
_HIDDEN = 2  # `hidden` of a column in PRAGMA table_xinfo; from this value on it is computed when it is read


_IS_PLAIN = " AND plain({})"


def _whole(column: str, least: int = 0) -> str:
    return f"typeof({column}) = 'integer' AND {column} BETWEEN {least} AND {_MOST}"


def _real(column: str, least: float = 0.0) -> str:
    return f"typeof({column}) IN ('real', 'integer') AND {column} BETWEEN {least} AND 1e15"


def _text(column: str) -> str:
    return f"typeof({column}) = 'text'" + _IS_PLAIN.format(column)


def _plain(text: object) -> bool:
    """Return whether a terminal shows the text as it is."""
    return isinstance(text, str) and (text.isprintable() or visible(text) == text)


# For each table: an SQL expression that names a row, and the rules of its columns.
_RULES: Mapping[str, tuple[str, Mapping[str, str]]] = MappingProxyType(
    {
        "identity": (
            "key",
            {"value": f"CASE WHEN key IN ({_COUNTS}) THEN {_whole('value')} ELSE {_text('value')} END"
                      " AND length(value) <= 1000"},
        ),
        "request": (
            "signature",
            {
                **{c: _text(c) for c in ("signature", "left_out", "date")},
                **{c: _whole(c) for c in ("id", "row_count", "micro_batches_only")},
                "workspace_limit_bytes": _whole("workspace_limit_bytes", -1),  # -1: the GPU failed before the first run
            },
        ),
        "candidate": (
            "provider || '/' || name",
            {
                **{c: _text(c) for c in ("provider", "name", "settings", "layouts", "notes", "refused")},
                **{c: _whole(c) for c in ("request", "workspace_bytes", "deterministic", "accumulates", "dominated")},
                **{c: _real(c) for c in ("time_us", "spread_us", "accumulate_us")},
                "error": "typeof(error) IN ('real', 'integer')",  # negative if unknown, infinite for a wrong result
            },
        ),
        "overhead": (
            "what || ' of ' || subject",
            {"what": _text("what"), "subject": _text("subject"), "size_bytes": _whole("size_bytes")},
        ),
        "constant": ("name", {"name": _text("name"), "value": _real("value")}),
        "collectives": (
            "kind || ' of ' || bytes || ' bytes'",
            {
                "ranks": _whole("ranks", 2), "max_ctas": _whole("max_ctas"), "bytes": _whole("bytes", 1),
                "time_us": _real("time_us"), "single_us": _real("single_us"),
            },
        ),
        "collective_slowdowns": (
            "kernel || ', ' || max_ctas || ' thread blocks'",
            {
                "ranks": _whole("ranks", 2), "max_ctas": _whole("max_ctas"),
                "kernel_ratio": _real("kernel_ratio"), "collective_ratio": _real("collective_ratio"),
            },
        ),
    }
)  # fmt: skip


def guard(connection: sqlite3.Connection) -> None:
    """Protect a connection before its file is read.

    The file can then not call functions with side effects, no query runs forever, and no memory is allocated for as
    many bytes as a damaged value claims to have.
    """
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE_BYTES)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    steps = 0

    def enough() -> bool:
        nonlocal steps
        steps += 1
        return steps > MOST_STEPS

    connection.set_progress_handler(callback(enough), STEPS)


def check_structure(connection: sqlite3.Connection, path: Path) -> None:
    """Check, before the file is read or written, that it has only tables with stored columns.

    Raises:
        MbcError: MBC073, it has a view, a trigger, an index or a computed column.
    """
    for kind, name, table, sql in connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema"):
        if kind not in ("table", "index") or (kind == "index" and sql is not None):
            raise damaged(path, f"there is a {kind} in it, '{name}'")
        computed = connection.execute(
            f"SELECT name FROM pragma_table_xinfo(?) WHERE hidden >= {_HIDDEN}", (table,)
        ).fetchone()
        if (sql or "").upper().lstrip().startswith("CREATE VIRTUAL") or computed is not None:
            raise damaged(path, f"its table '{name}' is computed")


def check_contents(connection: sqlite3.Connection, path: Path) -> None:
    """Check the columns of a profile of today's schema, and the range of every value.

    Raises:
        MbcError: MBC073; the message names the row.
    """
    connection.create_function("plain", 1, callback(_plain), deterministic=True)
    for name, expected in _columns().items():
        columns = {row[1] for row in connection.execute(f"PRAGMA table_xinfo({name})")}
        if columns != expected:
            raise damaged(path, f"its table '{name}' has the wrong columns: {', '.join(sorted(columns)) or 'none'}")
    for table, (row, rules) in _RULES.items():
        rules = {column: _without_known(connection, table, column, rule) for column, rule in rules.items()}
        wrong = " ".join(f"WHEN NOT ({rule}) THEN '{column}'" for column, rule in rules.items())
        holds = " AND ".join(f"({rule})" for rule in rules.values())
        bad = connection.execute(f"SELECT {row}, CASE {wrong} END FROM {table} WHERE NOT ({holds}) LIMIT 1").fetchone()
        if bad is not None:
            called, column = str(bad[0])[:80], bad[1]
            raise damaged(path, f"{column} of {called!r} in its table '{table}' is out of range or of another type")


def _without_known(connection: sqlite3.Connection, table: str, column: str, rule: str) -> str:
    """Return the rule of a column without the test for plain text if all its texts are plain.

    Few of the texts are distinct, and SQLite calls Python for each of them.
    """
    asks = _IS_PLAIN.format(column)
    if not rule.endswith(asks):
        return rule
    # Without the inner query's LIMIT, SQLite would call `plain` for every row before it removes duplicates.
    each = f"SELECT DISTINCT {column} FROM {table} LIMIT -1"
    odd = f"SELECT 1 FROM ({each}) WHERE NOT plain({column}) LIMIT 1"
    return rule if connection.execute(odd).fetchone() else rule.removesuffix(asks)


def _columns() -> dict[str, set[str]]:
    with sqlite3.connect(":memory:") as connection:
        for statement in statements(SCHEMA):
            connection.execute(statement)
        return {table: {row[1] for row in connection.execute(f"PRAGMA table_xinfo({table})")} for table in _RULES}
