"""Plan files: JSON text that does not differ from run to run, and that is read strictly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from mbc.collection import uncollected
from mbc.errors import MbcError
from mbc.plan.decode import decode_plan
from mbc.plan.encode import encode_plan
from mbc.plan.model import SCHEMA_VERSION, Plan
from mbc.plan.records import MISSING_OR_UNKNOWN, BadField, short
from mbc.plan.schema import CHECKSUM, FORMAT, content_checksum
from mbc.units import with_article

PLAN_FILE = "plan.json"  # in a package
MOST_BYTES = 1 << 29  # of a plan or a source that is read


def rank_folder(plan: Plan) -> str:
    """Return the folder, in a package, for the plan of ranks that do not run the plan of rank 0."""
    assert plan.graph.ranks is not None
    return f"rank{plan.graph.ranks.members[0]}"


_AGAIN = "compile the network again with 'mbc compile'"


@uncollected()
def dump_plan(plan: Plan) -> str:
    """Return the text of a plan file: ASCII, one row of a table on each line. Equal plans give equal bytes."""
    document = encode_plan(plan)
    document[CHECKSUM] = content_checksum(document)
    lines: list[str] = []
    _write(document, lines, "", "")
    return "\n".join(lines) + "\n"


@uncollected()
def load_plan(text: str, name: str) -> Plan:
    """Return the plan in the text of a plan file.

    Args:
        text: Content of the file.
        name: The file, as messages name it.

    Raises:
        MbcError: MBC110 (not JSON, or cut short), MBC111 (JSON, but not a plan), MBC112 (another schema version),
            MBC113 (edited), MBC114 (a missing or unknown field), MBC115 (a wrong type or value), MBC116 (a reference to
            something that does not exist), MBC117 (a buffer outside its space).
    """
    if not isinstance(cast(object, text), str):
        raise MbcError(
            "MBC110", f"{name} is not text but {with_article(type(text).__name__)}", "pass the content of a plan file"
        )
    document = _parse(text, name)
    if document.get("format") != FORMAT:
        raise MbcError("MBC111", f"{name} is not a plan file: its format is {short(document.get('format'))}", _AGAIN)
    elsewhere = f"use the version of mbc that wrote it ({short(document.get('mbc'))}), or {_AGAIN}"
    if document.get("schema") != SCHEMA_VERSION:
        raise MbcError(
            "MBC112",
            f"{name} is a plan of schema version {short(document.get('schema'))}, this mbc reads {SCHEMA_VERSION}",
            elsewhere,
        )
    if document.get(CHECKSUM) != content_checksum(document):
        raise MbcError(
            "MBC113",
            f"{name} was changed after it was written: its checksum is not that of its content",
            f"restore the file, or {_AGAIN}",
        )
    try:
        return decode_plan(document)
    except BadField as bad:
        place = f"at {bad.path}: " if bad.path else ""
        remedy = elsewhere if bad.code == MISSING_OR_UNKNOWN else _AGAIN
        raise MbcError(bad.code, f"{name} is not a valid plan: {place}{bad.message}", remedy) from None


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        document = json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        whole = text.rstrip()
        cut = error.pos >= len(whole) or (whole.startswith("{") and not whole.endswith("}"))
        what = "is cut short" if cut else f"is not JSON: {error.msg}"
        raise MbcError("MBC110", f"{name} {what} (line {error.lineno}, column {error.colno})", _AGAIN) from None
    except (ValueError, RecursionError) as error:
        raise MbcError("MBC110", f"{name} is not JSON of a plan: {error}", _AGAIN) from None
    if not isinstance(document, dict):
        raise MbcError("MBC111", f"{name} is not a plan file: it holds {short(document)}", _AGAIN)
    return cast(dict[str, Any], document)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"the number {constant}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if any(key == other for other, _ in pairs[:i]))
        raise ValueError(f"the field '{twice}' is there twice")
    return fields


_encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode


def _write(value: Any, lines: list[str], prefix: str, suffix: str) -> None:
    """Append the lines of `value`: objects one field a line, tables one row a line, everything else on one line."""
    fields = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    if not _is_long(fields):
        lines.append(prefix + _encode(value) + suffix)
        return
    lines.append(prefix + "{")
    last = len(fields) - 1
    for i, (key, item) in enumerate(fields.items()):
        comma = "" if i == last else ","
        if key == "rows" and item:
            lines.append('"rows":[')
            lines += [_encode(row) + "," for row in item[:-1]]
            lines += [_encode(item[-1]), "]" + comma]
        else:
            _write(item, lines, f'"{key}":', comma)
    lines.append("}" + suffix)


def _is_long(fields: Mapping[str, Any]) -> bool:
    return any(isinstance(item, dict) or key in ("rows", "launches") for key, item in fields.items())
