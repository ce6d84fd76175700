"""Profiles of earlier schema versions brought up to date: columns and tables that they lack, and
names that were others then."""

from __future__ import annotations

import json
import sqlite3
from functools import lru_cache

from mbc import aliases
from mbc.profile.schema import COLLECTIVES, SCHEMA_VERSION, statements

_DATED = 3  # the first version with dates of requests
_FOR_PARTS = 4  # with `for_parts`, which earlier ones say in words
_RENAMED = 5  # with today's names
_COLLECTIVES = 6  # with times of collectives
_SAYS_FOR_PARTS = "left_out LIKE '%were dominated at%' OR left_out LIKE '%gain nothing from sizes below%'"


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """Make of a profile of an earlier `version` one of SCHEMA_VERSION. A file is migrated within a transaction of the
    caller's: an mbc that knows the earlier version only cannot read it afterwards."""
    if version < _DATED:
        connection.execute("ALTER TABLE request ADD COLUMN date TEXT NOT NULL DEFAULT ''")
    if version < _FOR_PARTS:
        connection.execute("ALTER TABLE request ADD COLUMN for_parts INTEGER NOT NULL DEFAULT 0")
        connection.execute(f"UPDATE request SET for_parts = 1 WHERE {_SAYS_FOR_PARTS}")
    if version < _RENAMED:
        _rename(connection)
    if version < _COLLECTIVES:
        for statement in statements(COLLECTIVES):
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _rename(connection: sqlite3.Connection) -> None:
    connection.execute(f"ALTER TABLE request RENAME COLUMN for_parts TO {aliases.COLUMNS['for_parts']}")
    connection.create_function("new_signature", 1, aliases.signature, deterministic=True)
    connection.create_function("new_kernel", 1, aliases.kernel, deterministic=True)
    connection.create_function("new_settings", 2, _settings, deterministic=True)
    connection.execute("UPDATE request SET signature = new_signature(signature)")
    connection.execute("UPDATE candidate SET name = new_kernel(name), settings = new_settings(provider, settings)")


@lru_cache(maxsize=1024)  # thousands of rows have few different ones
def _settings(provider: str, text: str) -> str:
    pairs = [[aliases.setting(provider, name), value] for name, value in json.loads(text)]
    return json.dumps(pairs, separators=(",", ":"))
