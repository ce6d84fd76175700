"""Arguments of a module's calls other than arrays: what a user can pass there, and what is said of anything else."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.units import parse_duration, with_article


def shown(given: object) -> str:
    """What was passed, for a message: on one line, and not long."""
    try:
        text = " ".join(repr(given).split())
    except Exception:  # an object that cannot even be shown
        text = with_article(type(given).__name__)
    return text if len(text) <= 60 else f"{text[:57]}..."


def flag(name: str, given: object) -> bool:
    """A setting that is on or off; MBC167 for what is neither."""
    if not isinstance(given, bool | np.bool_ | int):
        raise MbcError("MBC167", f"{name} is {shown(given)}, neither True nor False", "pass one of the two")
    return bool(cast(Any, given))


def choice(name: str, given: object, among: Sequence[str]) -> str:
    """One of some names; MBC167 for anything else."""
    if not isinstance(given, str) or given not in among:
        raise MbcError("MBC167", f"unknown {name} {shown(given)}", f"choose one of {', '.join(among)}")
    return given


def duration_of(name: str, given: str | None) -> float:
    """Seconds of `90s` and the like, infinite for None; MBC167 for anything else."""
    try:
        return math.inf if given is None else parse_duration(given)
    except (TypeError, ValueError) as error:
        raise MbcError("MBC167", f"{name} is no duration: {error}", "pass 90s, 5min or None") from error


def rate_of(given: object) -> float:
    """A learning rate; MBC169 unless it is one finite number of at least 0."""
    try:
        rate = float(cast(Any, given)) if np.ndim(cast(Any, given)) == 0 and not isinstance(given, str) else math.nan
    except Exception:  # whatever the object raises that was passed
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise MbcError("MBC169", f"the learning rate is {shown(given)}", "pass a finite number of at least 0")
    return rate


def path_of(given: object, code: str, what: str) -> Path:
    """A path to a file or folder; an error with `code`, which begins with `what`, for anything else."""
    why = None
    if not isinstance(given, str | os.PathLike):
        why = f"{shown(given)} is {with_article(type(given).__name__)}, not a path"
    else:
        path = cast(object, os.fspath(cast("os.PathLike[Any]", given)))
        if isinstance(path, str) and path and "\0" not in path:
            return Path(path)
        why = f"{shown(path)} is no path"
    raise MbcError(code, f"{what}: {why}", "give a path as text or as pathlib.Path")


def texts(metadata: object) -> dict[str, str]:
    """Metadata of a checkpoint; MBC162 unless names and values are text."""
    given = dict(cast("Mapping[object, object]", metadata)) if isinstance(metadata, Mapping) else None
    if metadata is None:
        return {}
    if given is None or not all(_is_text(part) for item in given.items() for part in item):
        raise MbcError(
            "MBC162",
            f"cannot write a checkpoint: metadata {shown(cast(object, metadata))} do not map text to text",
            "pass texts only",
        )
    return cast("dict[str, str]", given)


def plain_array(name: str, given: object) -> NDArray[Any]:
    """What is to become state `name`, as an array; MBC165 where NumPy cannot read it."""
    try:
        return np.asarray(given)
    except Exception as error:  # whatever the object raises that was passed
        raise MbcError("MBC165", f"state '{name}' cannot be set: {error}", "pass a NumPy array") from error


def _is_text(given: object) -> bool:
    """Text that UTF-8 can write."""
    try:
        return isinstance(given, str) and bool(given.encode() or True)
    except UnicodeEncodeError:
        return False


def matched(names: list[str], inputs: tuple[object, ...], named: dict[str, object]) -> dict[str, object]:
    """Inputs by name; MBC167 unless every name has one."""
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
