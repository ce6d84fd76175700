"""Random changes to inputs of mbc by kind: bytes, words of the language, JSON, SQLite, archives, arguments.

Each function takes the bytes of an input and returns other bytes. An input that cannot be read as its kind
is changed as bytes.
"""

from __future__ import annotations

import io
import json
import random
import re
import sqlite3
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

from checkpoint_mutations import KINDS as CHECKPOINT_KINDS
from checkpoint_mutations import mutant

LARGEST = 1 << 16  # bytes of an input
NUMBERS = (
    -(2**63), -(2**31), -1, 0, 1, 2, 3, 7, 8, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63,
    2**64, 10**30, 10**400, 0.5, -0.0, 1e-320, 9e999, -9e999,
)  # fmt: skip
TEXTS = ("", "a", "abc", "\x1b[2J", "\u202egnp", "\0", "x" * 300, "../../x", "/dev/zero", "\ud7ff", "é", "1e400")
STRANGE: tuple[Any, ...] = (*NUMBERS[:-2], *TEXTS, None, True, False, [], {}, [[]], [0, 1], {"a": 1}, ["r"] * 4)


def change_bytes(data: bytes, draw: random.Random) -> bytes:
    """Return the data with changed bits, bytes or runs of bytes."""
    result = bytearray(data or b"\0")
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        at, other = draw.randrange(len(result)), draw.randrange(len(result))
        length = min(draw.choice((1, 2, 4, 8, 64)), len(result) - at)
        how = draw.randrange(8)
        if how <= 1:
            result[at] ^= 1 << draw.randrange(8)
        elif how == 2:
            result[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        elif how == 3 and len(result) > length:
            del result[at : at + length]
        elif how == 4:
            result[at:at] = draw.randbytes(length)
        elif how == 5:
            result[other:other] = result[at : at + length]
        elif how == 6:
            result[at : at + length] = draw.choice(((1 << 8 * length) - 1, draw.choice((0, 1, 1 << 4)))).to_bytes(
                length, draw.choice(("little", "big"))
            )
        elif len(result) > 1:
            del result[draw.randrange(1, len(result)) if draw.random() < 0.3 else -1 :]
        if not result:
            result = bytearray(b"\0")
    return bytes(result[:LARGEST])


def change_words(words: Sequence[str]) -> Callable[[bytes, random.Random], bytes]:
    """Return a function that drops, doubles, swaps or replaces words of a text in the language.

    Words are replaced by `words` or numbers. In half of the cases a word is replaced only by one of its own sort, which
    leaves more texts that parse.
    """

    def change(data: bytes, draw: random.Random) -> bytes:
        parts = re.findall(r"\s+|\w+|[^\w\s]", data.decode("utf-8", "replace")) or [" "]
        if draw.random() < 0.5:
            for _ in range(draw.choice((1, 1, 2, 3))):
                at = draw.randrange(len(parts))
                if parts[at].isdecimal():
                    parts[at] = str(draw.choice((0, 1, 2, 3, 4, 5, 7, 8, 16, 64, 1000, 2**31, 0.5, 1e-5)))
                elif parts[at].isidentifier():
                    parts[at] = draw.choice((draw.choice(words), draw.choice([p for p in parts if p.isidentifier()])))
                elif parts[at] in "+-*/%<>,":
                    parts[at] = draw.choice("+-*/%<>,")
            return "".join(parts).encode("utf-8", "replace")[:LARGEST]
        for _ in range(draw.choice((1, 1, 2, 3, 8))):
            at, other = draw.randrange(len(parts)), draw.randrange(len(parts))
            how = draw.randrange(8)
            if how == 0 and len(parts) > 1:
                del parts[at]
            elif how == 1:
                parts.insert(at, parts[other])
            elif how == 2:
                parts[at], parts[other] = parts[other], parts[at]
            elif how == 3:
                parts[at] = str(draw.choice(NUMBERS))[:40]
            elif how == 4:
                parts[at:at] = parts[min(at, other) : min(at, other) + draw.randint(1, 20)]
            elif how == 5:
                parts.insert(at, draw.choice(TEXTS))
            else:
                parts[at] = draw.choice(words)
        return "".join(parts).encode("utf-8", "replace")[:LARGEST]

    return change


def change_json(data: bytes, draw: random.Random) -> bytes:
    """Return a document in which a few values are replaced, dropped, doubled or exchanged for other values of it."""
    try:
        document: Any = json.loads(data)
    except (ValueError, RecursionError):
        return change_bytes(data, draw)
    places = list(_places(document))
    if not places:
        return change_bytes(data, draw)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        holder, key = draw.choice(places)
        if isinstance(holder, list) and not key < len(holder):
            continue
        if isinstance(holder, dict) and key not in holder:
            continue
        value = holder[key]
        how = draw.randrange(7)
        if how == 0:
            del holder[key]
        elif how == 1 and isinstance(value, int):
            holder[key] = value + draw.choice((-256, -1, 1, 2, 256, 2**31))
        elif how == 2 and isinstance(holder, list):
            holder.insert(key, draw.choice((value, draw.choice(STRANGE))))
        elif how == 3:
            other, place = draw.choice(places)
            if (isinstance(other, list) and place < len(other)) or (isinstance(other, dict) and place in other):
                holder[key] = json.loads(json.dumps(other[place]))
        elif how == 4 and isinstance(holder, dict):
            holder[draw.choice(("more", "", key + "x"))] = holder.pop(key) if draw.random() < 0.5 else value
        else:
            holder[key] = draw.choice(STRANGE)
    return json.dumps(document, separators=(",", ":")).encode()[:LARGEST]


def _places(value: Any) -> Any:
    """Yield every container in a document with each of its keys."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from _places(inner)


def change_checkpoint(data: bytes, draw: random.Random) -> bytes:
    """Return a readable file changed by one of the kinds of `checkpoint_mutations`."""
    try:
        return mutant(data, draw.choice(list(CHECKPOINT_KINDS)), draw)[:LARGEST]
    except Exception:  # it was no file of the format any more
        return change_bytes(data, draw)


_SQL_VALUES = (
    "-1", "0", "1", "'abc'", "9e999", "-9e999", "NULL", "x'00ff'", "9223372036854775807", "'[[\"engine\",1]]'",
    "1e-300",
    "'[[' || zeroblob(9) || ']]'", "char(27) || '[2J'", "char(8238)", "'NCHW'", "zeroblob(100000)", "'a' || char(0)",
    "'[]'", "'{}'", "'[[1,2,3]]'", "printf('%.*c', 30000, '[')", "'1/0'", "''", "'convolution'", "random()", "0.5",
)  # fmt: skip
_SQL_FORMS = (
    "CREATE VIEW v AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n) SELECT i FROM n",
    "CREATE TRIGGER g AFTER INSERT ON request BEGIN DELETE FROM candidate; END",
    "CREATE VIRTUAL TABLE f USING fts5(a)", "CREATE INDEX i ON candidate(name)", "DROP TABLE {table}",
    "ALTER TABLE {table} ADD COLUMN more TEXT", "ALTER TABLE {table} ADD COLUMN more AS (randomblob(1000000000))",
    "ALTER TABLE {table} RENAME TO other", "PRAGMA user_version = {number}", "PRAGMA application_id = {number}",
    "ALTER TABLE {table} RENAME COLUMN {column} TO other", "DELETE FROM {table}", "PRAGMA encoding = 'UTF-16'",
    "CREATE TABLE IF NOT EXISTS {table} AS SELECT 1 AS a", "DELETE FROM identity WHERE key = 'gpu'",
)  # fmt: skip


def change_database(data: bytes, draw: random.Random) -> bytes:
    """Return a database whose values or tables were changed by SQL statements."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        connection.deserialize(data)
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        for _ in range(draw.choice((1, 1, 2, 4))):
            table = draw.choice(tables)
            column = draw.choice([row[1] for row in connection.execute(f"PRAGMA table_info({table})")])
            form = draw.choice(_SQL_FORMS) if draw.random() < 0.3 else "UPDATE {table} SET {column} = {value}"
            if form.startswith("UPDATE") and draw.random() < 0.5:
                form += " WHERE rowid = (SELECT min(rowid) FROM {table})"
            number = draw.choice((-1, 0, 1, 2, 3, 4, 5, 6, 7, 2**31 - 1))
            try:
                connection.execute(
                    form.format(table=table, column=column, value=draw.choice(_SQL_VALUES), number=number)
                )
            except (sqlite3.Error, UnicodeError):
                continue
        return connection.serialize()[: 1 << 20]
    except (sqlite3.Error, IndexError, UnicodeError):
        return change_bytes(data, draw)
    finally:
        connection.close()


_HEADERS = (
    ("'fortran_order': False", "'fortran_order': True"), ("<f4", "|O"), ("<f4", "<f8"), ("<f4", "<U9"),
    ("<i8", "<M8[s]"),
    ("<f4", "V0"), ("(4,", "(-4,"), ("(4,", "(1000000000000,"), ("(4,", "(4, 0,"), ("(4,", "(" * 200 + "4,"),
    ("'shape'", "'shapf'"), ("{", "[" * 100), ("<f4", "<f2"), ("(4,", "(2**70,"), ("(4,", "(True,"), ("<f4", "<i1"),
    ("'<f4'", "[('a', '<f4')]"), ("(4,", "(9" + "9" * 400 + ","), ("<f4", ">f4"), ("<f4", "<c8"), ("(4,", "(4.0,"),
)  # fmt: skip


def change_archive(data: bytes, draw: random.Random) -> bytes:
    """Return an `.npz` with a changed header, name, content or compression of a member."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    except Exception:  # damaged: as bytes
        return change_bytes(data, draw)
    if not members:
        return change_bytes(data, draw)
    at = draw.randrange(len(members))
    name, content = members[at]
    how = draw.randrange(7)
    if how <= 2:
        old, new = draw.choice(_HEADERS)
        content = content.replace(old.encode(), new.encode(), 1)
    elif how == 3:
        content = change_bytes(content, draw)
    elif how == 4:
        name = draw.choice(("", "a.npy", "../x.npy", "\x1b[2J.npy", name.removesuffix(".npy"), name.upper(), "a" * 300))
    elif how == 5:
        members.append(draw.choice(members))
    else:
        content += bytes(draw.choice((1, 8, 1 << 20)))
    members[at] = (name, content)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for filename, written in members:
            archive.writestr(zipfile.ZipInfo(filename), written)
    result = out.getvalue()
    return (change_bytes(result, draw) if draw.random() < 0.3 else result)[:LARGEST]


def change_lines(words: Sequence[str]) -> Callable[[bytes, random.Random], bytes]:
    """Return a function that drops, doubles, swaps, misspells or replaces arguments of a command line."""

    def change(data: bytes, draw: random.Random) -> bytes:
        lines = data.decode("utf-8", "surrogateescape").split("\n")
        for _ in range(draw.choice((1, 1, 2, 4))):
            at = draw.randrange(len(lines) + 1)
            how = draw.randrange(6)
            if how == 0 and at < len(lines) and len(lines) > 1:
                del lines[at]
            elif how == 1 and at < len(lines):
                lines[at] = draw.choice(words)
            elif how == 2 and at < len(lines) and lines[at]:
                edited = list(lines[at])
                edited[draw.randrange(len(edited))] = draw.choice("aZ09-=.,:%\x1bé \udc80")
                lines[at] = "".join(edited)
            elif how == 3:
                lines.insert(at, str(draw.choice(NUMBERS))[:60])
            elif how == 4 and at < len(lines):
                lines[at] += draw.choice(
                    ("", "=", "=1", "=" + draw.choice(words), draw.choice(TEXTS).replace("\n", ""))
                )
            else:
                lines.insert(at, draw.choice(words))
        return "\n".join(lines[:40]).encode("utf-8", "surrogateescape")[:LARGEST]

    return change
