"""Strict reading of JSON values into typed ones. A mistake names its place relative to the value being read."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
E = TypeVar("E", bound=Enum)
_NAME = re.compile(r"[A-Za-z0-9_.]+", re.ASCII)
_NAMES = re.compile(rf"{_NAME.pattern}(\+{_NAME.pattern})*", re.ASCII)

_NONE: Mapping[str, Any] = MappingProxyType({})

MISSING_OR_UNKNOWN = "MBC114"
WRONG_VALUE = "MBC115"
NO_SUCH_THING = "MBC116"


class BadField(Exception):
    """A mistake in a value. `path` is its place relative to that value; every caller prefixes its own part."""

    def __init__(self, message: str, path: str = "", code: str = WRONG_VALUE) -> None:
        """Take the message, the place and the error code."""
        super().__init__(message)
        self.message, self.path, self.code = message, path, code

    def inside(self, place: str) -> BadField:
        """Return the mistake with `place` prefixed to its path."""
        joint = "" if not self.path or self.path.startswith("[") else "."
        return BadField(self.message, f"{place}{joint}{self.path}", self.code)


def at(place: str, read: Callable[..., T], *arguments: Any) -> T:
    """Return `read(*arguments)`; a mistake in it gets `place` prefixed to its path."""
    try:
        return read(*arguments)
    except BadField as bad:
        raise bad.inside(place) from None


def whole(value: Any, low: int = 0, high: int = 1 << 62) -> int:
    """Return an integer between two bounds, both included.

    Raises:
        BadField: `value` is anything else.
    """
    if type(value) is not int:
        raise BadField(f"expected a whole number, found {short(value)}")
    if not low <= value <= high:
        raise BadField(f"{value} is not between {low} and {high}")
    return value


def real(value: Any, low: float = 0.0) -> float:
    """Return a finite number that is not below `low`, as a float.

    Raises:
        BadField: `value` is anything else.
    """
    if type(value) not in (int, float) or not -sys.float_info.max <= value <= sys.float_info.max:
        raise BadField(f"expected a finite number, found {short(value)}")
    if value < low:
        raise BadField(f"{value} is below {low}")
    return float(value)


def boolean(value: Any) -> bool:
    """Return a boolean.

    Raises:
        BadField: `value` is anything else.
    """
    if type(value) is not bool:
        raise BadField(f"expected true or false, found {short(value)}")
    return value


def text(value: Any) -> str:
    """Return a text.

    Raises:
        BadField: `value` is anything else.
    """
    if type(value) is not str:
        raise BadField(f"expected a text, found {short(value)}")
    return value


def string(value: Any) -> str:
    """Return a text of printable characters, so that a terminal can show it safely.

    Raises:
        BadField: `value` is anything else.
    """
    if not text(value).isprintable():
        raise BadField(f"{short(value)} has characters that cannot be shown")
    return value


def name(value: Any) -> str:
    """Return a name of a value or an operation; no other text may reach generated code.

    Raises:
        BadField: `value` is anything else.
    """
    if not _NAME.fullmatch(string(value)):
        raise BadField(f"{short(value)} is not a name (letters, digits, '_' and '.')")
    return value


def kernel_name(value: Any) -> str:
    """Return the name of a kernel; a kernel of a group has the names of its operations joined by "+".

    Raises:
        BadField: `value` is anything else.
    """
    if not _NAMES.fullmatch(string(value)):
        raise BadField(f"{short(value)} is not a name, nor names joined by '+'")
    return value


def array(value: Any, length: int | None = None) -> list[Any]:
    """Return a list, of `length` items if that is given.

    Raises:
        BadField: `value` is anything else.
    """
    if type(value) is not list:
        raise BadField(f"expected a list, found {short(value)}")
    items = cast(list[Any], value)
    if length is not None and len(items) != length:
        raise BadField(f"expected {length} items, found {len(items)}")
    return items


def each(value: Any, read: Callable[..., T], *arguments: Any) -> tuple[T, ...]:
    """Return `read(item, *arguments)` for every item of a list."""
    return tuple(at(f"[{i}]", read, item, *arguments) for i, item in enumerate(array(value)))


def member(value: Any, allowed: Any, what: str) -> Any:
    """Return `value`, which must be a member of `allowed`; `what` is the noun for the message.

    Raises:
        BadField: `value` is anything else.
    """
    if type(value) not in (str, int) or value not in allowed:
        raise BadField(f"there is no {what} {short(value)}", code=NO_SUCH_THING)
    return value


def choice(value: Any, enum: type[E]) -> E:
    """Return the member of an enumeration with this value.

    Raises:
        BadField: There is none.
    """
    try:
        return enum(value)
    except ValueError:
        allowed = ", ".join(str(item.value) for item in enum)
        raise BadField(f"{short(value)} is not one of {allowed}") from None


def keyed(value: Any, names: Sequence[str], defaults: Mapping[str, Any] = _NONE) -> dict[str, Any]:
    """Return an object with exactly the fields `names`; a missing field gets its default.

    Raises:
        BadField: A field without a default is missing, or there is an unknown field.
    """
    if type(value) is not dict:
        raise BadField(f"expected an object, found {short(value)}")
    document = cast(dict[str, Any], value)
    missing = [key for key in names if key not in document]
    for key in missing:
        if key not in defaults:
            raise BadField(f"the field '{key}' is missing", code=MISSING_OR_UNKNOWN)
    if missing:
        document = document | {key: defaults[key] for key in missing}
    for key in document:
        if key not in names:
            raise BadField(f"unknown field '{key}'", code=MISSING_OR_UNKNOWN)
    return document


def table(
    value: Any, columns: Sequence[str], read: Callable[[list[Any]], T], defaults: Mapping[str, Any] = _NONE
) -> tuple[T, ...]:
    """Return the rows of a table, each read by `read`.

    Args:
        value: The JSON object `{"columns": [...], "rows": [[...], ...]}`.
        columns: All columns, in the order in which `read` gets their cells.
        read: Function that turns the cells of a row into an object.
        defaults: Cells of the columns that the file may lack.
    """
    document = keyed(value, ("columns", "rows"))
    there = at("columns", each, document["columns"], string)
    _check_columns(there, columns, defaults)
    places = None if there == tuple(columns) else [there.index(c) if c in there else None for c in columns]
    items: list[T] = []
    row: Any
    for i, row in enumerate(at("rows", array, document["rows"])):
        try:
            cells = array(row, len(there))
            if places is not None:
                cells = [defaults[c] if p is None else cells[p] for c, p in zip(columns, places, strict=True)]
            items.append(read(cells))
        except BadField as bad:
            raise bad.inside(f"rows[{i}]") from None
    return tuple(items)


def _check_columns(there: Sequence[str], columns: Sequence[str], defaults: Mapping[str, Any]) -> None:
    for column in there:
        if column not in columns:
            raise BadField(f"unknown column {short(column)}", "columns", MISSING_OR_UNKNOWN)
    if list(there) != [c for c in columns if c in there or c not in defaults]:
        raise BadField(f"expected the columns {', '.join(columns)}", "columns", MISSING_OR_UNKNOWN)


def record(cls: type[T], value: Any, low: float = -math.inf) -> T:
    """Return a dataclass from an object with its fields; fields with a default may be missing.

    Args:
        cls: The dataclass.
        value: The JSON object.
        low: Least value of all numbers.
    """
    hints, defaults = _fields(cls)
    keyed(value, tuple(hints), defaults)
    return cls(**{key: at(key, _typed, value[key], hint, low) for key, hint in hints.items() if key in value})


@cache
def _fields(cls: type[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the types and the defaults of a dataclass's fields by name."""
    hints = get_type_hints(cls)
    init_fields = [f for f in fields(cls) if f.init or f.default is MISSING]
    return {f.name: hints[f.name] for f in init_fields}, {
        f.name: f.default for f in init_fields if f.default is not MISSING
    }


def _typed(value: Any, hint: Any, low: float) -> Any:
    """Return a value of a field's type: int, float, bool, str, an enumeration, a dataclass, a tuple of these, or None.

    Raises:
        TypeError: The type is another one.
    """
    if hint is int:
        return whole(value, -(1 << 62) if low == -math.inf else int(low))
    if hint is float:
        return real(value, low)
    if hint is bool:
        return boolean(value)
    if hint is str:
        return string(value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return choice(value, hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return record(cast(type[Any], hint), value, low)
    if get_origin(hint) is UnionType:
        return None if value is None else _typed(value, get_args(hint)[0], low)
    if get_origin(hint) is tuple:
        inner = get_args(hint)
        if len(inner) == 2 and inner[1] is Ellipsis:
            return each(value, _typed, inner[0], low)
        items = array(value, len(inner))
        return tuple(at(f"[{i}]", _typed, item, inner[i], low) for i, item in enumerate(items))
    raise TypeError(f"fields of type {hint} cannot be in a plan file")


def short(value: Any) -> str:
    """Return a short text of a value for messages."""
    shown = "null" if value is None else repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
