"""Fields of settings that are written only where they are set.

A setting that an operation or an optimizer gains must leave alone what was written before: plans, the signatures under
which a profile keeps times, texts. So its field is `optional`, and its default means what all of them meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, field, fields, is_dataclass
from typing import Any, TypeVar, cast

T = TypeVar("T")
_OPTIONAL = "optional"


def optional(default: T) -> T:
    """A field of a dataclass that is written only where it is not the default."""
    return field(default=default, metadata={_OPTIONAL: True})


def written_fields(settings: Any) -> tuple[Field[Any], ...]:
    """The fields of a dataclass that are to be written, in their order."""
    return tuple(f for f in fields(settings) if _OPTIONAL not in f.metadata or getattr(settings, f.name) != f.default)


def written(settings: Any) -> Mapping[str, Any]:
    """As `dataclasses.asdict`, of the fields that are to be written."""
    return {f.name: _plain(getattr(settings, f.name)) for f in written_fields(settings)}


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_plain, cast("tuple[object, ...]", value)))
    return written(value) if is_dataclass(value) else value
