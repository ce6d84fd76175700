"""Checks of a module's arguments other than arrays, with errors that show what was passed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.units import parse_duration, parse_size, with_article


def shown(given: object) -> str:
    """Return an argument's text for a message: on one line, of at most 60 characters."""
    try:
        text = " ".join(repr(given).split())
    except Exception:  # an object whose `__repr__` fails
        text = with_article(type(given).__name__)
    return text if len(text) <= 60 else f"{text[:57]}..."


def flag(name: str, given: object) -> bool:
    """Return a setting that is on or off.

    Raises:
        MbcError: MBC167 if the argument is neither a boolean nor an integer.
    """
    if not isinstance(given, bool | np.bool_ | int):
        raise MbcError("MBC167", f"{name} is {shown(given)}, neither True nor False", "pass True or False")
    return bool(cast(Any, given))


def choice(name: str, given: object, among: Sequence[str]) -> str:
    """Return the argument if it is one of the names `among`.

    Raises:
        MbcError: MBC167 for any other argument.
    """
    if not isinstance(given, str) or given not in among:
        raise MbcError("MBC167", f"unknown {name} {shown(given)}", f"choose one of {', '.join(among)}")
    return given


def duration_of(name: str, given: str | None) -> float:
    """Return a duration such as `90s` in seconds; None means infinity.

    Raises:
        MbcError: MBC167 if the text is not a duration.
    """
    try:
        return math.inf if given is None else parse_duration(given)
    except (TypeError, ValueError) as error:
        raise MbcError("MBC167", f"{name} is not a duration: {error}", "pass 90s, 5min or None") from error


def size_of(name: str, given: str | int, least_bytes: int = 0) -> int:
    """Return a size such as `2GB`, or a number of bytes, in bytes.

    Raises:
        MbcError: MBC167 if the argument is no size, or one outside [`least_bytes`, 2^63).
    """
    remedy = f'write a size with its unit: {name}="12GB"'
    try:
        size_bytes = parse_size(given if isinstance(given, str) else f"{given}B")
    except ValueError as error:
        raise MbcError("MBC167", f"{name} is not a size: {error}", remedy) from error
    if not least_bytes <= size_bytes < 1 << 63:
        raise MbcError("MBC167", f"{name}={shown(given)} is {size_bytes} bytes", remedy)
    return size_bytes


def rate_of(given: object) -> float:
    """Return a learning rate as a float.

    Raises:
        MbcError: MBC169 unless the argument is one finite number of at least 0.
    """
    try:
        rate = float(cast(Any, given)) if np.ndim(cast(Any, given)) == 0 and not isinstance(given, str) else math.nan
    except Exception:  # the object that was passed may raise any error
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise MbcError("MBC169", f"the learning rate is {shown(given)}", "pass a finite number of at least 0")
    return rate


def path_of(given: object, code: str, what: str) -> Path:
    """Return the path to a file or folder that an argument names.

    Args:
        given: The argument: text, or an object that names a path.
        code: Code of the error.
        what: First words of the error's message, such as `cannot read a checkpoint`.

    Raises:
        MbcError: `code` if the argument is not a path, is empty, or contains a null character.
    """
    why = None
    if not isinstance(given, str | os.PathLike):
        why = f"{shown(given)} is {with_article(type(given).__name__)}, not a path"
    else:
        path = cast(object, os.fspath(cast("os.PathLike[Any]", given)))
        if isinstance(path, str) and path and "\0" not in path:
            return Path(path)
        why = f"{shown(path)} is not a path"
    raise MbcError(code, f"{what}: {why}", "give a path as text or as pathlib.Path")


def texts(metadata: object) -> dict[str, str]:
    """Return the metadata of a checkpoint; None means no metadata.

    Raises:
        MbcError: MBC162 unless all names and values are text that UTF-8 can encode.
    """
    given = dict(cast("Mapping[object, object]", metadata)) if isinstance(metadata, Mapping) else None
    if metadata is None:
        return {}
    if given is None or not all(_is_text(part) for item in given.items() for part in item):
        raise MbcError(
            "MBC162",
            f"cannot write a checkpoint: metadata {shown(cast(object, metadata))} do not map text to text",
            "pass text only",
        )
    return cast("dict[str, str]", given)


def plain_array(name: str, given: object) -> NDArray[Any]:
    """Return the new value of state `name` as an array.

    Raises:
        MbcError: MBC165 if NumPy cannot read the value.
    """
    try:
        return np.asarray(given)
    except Exception as error:  # the object that was passed may raise any error
        raise MbcError("MBC165", f"state '{name}' cannot be set: {error}", "pass a NumPy array") from error


def _is_text(given: object) -> bool:
    """Return whether the argument is text that UTF-8 can encode."""
    try:
        return isinstance(given, str) and bool(given.encode() or True)
    except UnicodeEncodeError:
        return False


def matched(names: list[str], inputs: tuple[object, ...], named: dict[str, object]) -> dict[str, object]:
    """Return the inputs by name.

    Args:
        names: All names of inputs, in the order of the source.
        inputs: Inputs that were passed by position.
        named: Inputs that were passed by name.

    Raises:
        MbcError: MBC167 unless each name has exactly one input.
    """
    given = dict(zip(names, inputs, strict=False))
    twice = [name for name in named if name in given]
    given.update(named)
    unknown = [name for name in named if name not in names]
    missing = [name for name in names if name not in given]
    if len(inputs) <= len(names) and not (twice or unknown or missing):
        return given
    problems = [f"{len(inputs)} were passed by position"] if len(inputs) > len(names) else []
    for label, those in (("missing", missing), ("unknown", unknown), ("passed twice", twice)):
        if those:
            problems.append(f"{label}: {', '.join(those)}")
    raise MbcError("MBC167", f"the inputs are ({', '.join(names)}); {'; '.join(problems)}", "pass each of them once")
