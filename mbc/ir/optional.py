"""Fields of settings that are written only if they are set.

A new setting of an operation or an optimizer must not change earlier plans, texts, and signatures under which a profile
keeps times. Hence its field is `optional`, and its default has the meaning of all earlier files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, cast

T = TypeVar("T")
_OPTIONAL = "optional"


def optional(default: T) -> T:
    """Return a field of a dataclass that is written only if it differs from its default."""
    return field(default=default, metadata={_OPTIONAL: True})


def written_fields(settings: Any) -> tuple[Field[Any], ...]:
    """Return the fields of a dataclass that must be written, in their order."""
    return tuple(
        f
        for f, is_optional in _fields_of(settings.__class__) or ()
        if not is_optional or getattr(settings, f.name) != f.default
    )


def written(settings: Any) -> Mapping[str, Any]:
    """Return the fields of a dataclass that must be written, by name, as `dataclasses.asdict` returns all fields."""
    return {f.name: _plain(getattr(settings, f.name)) for f in written_fields(settings)}


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_plain, cast("tuple[object, ...]", value)))
    return value if _fields_of(value.__class__) is None else written(value)


@cache
def _fields_of(kind: type) -> tuple[tuple[Field[Any], bool], ...] | None:
    """Return the fields of a dataclass, each with whether it is optional; None for other types."""
    return tuple((f, _OPTIONAL in f.metadata) for f in fields(kind)) if is_dataclass(kind) else None
