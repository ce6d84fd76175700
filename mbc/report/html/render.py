"""Data and templates to a page of one file, which fetches nothing.

Data is embedded as deflated JSON in base64, which has no character that could end its element. Scripts set texts by
`textContent`, so names are never interpreted, and the page's policy forbids any request.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from mbc.errors import MbcError
from mbc.resources import folder
from mbc.runtime.checkpoint import why
from mbc.runtime.replace import replace_file, try_replacing

_FOLDER = "report"
_LEVEL = 3  # of deflate: level 6, the default, takes three times as long to save a tenth
FIRST_SCRIPTS = ("base.js", "chart.js", "rows.js")


def render_page(template: str, scripts: Sequence[str], data: Mapping[str, Any], **fields: Any) -> str:
    """Return the text of a page.

    Args:
        template: File of templates/report.
        scripts: Files of templates/report, run in this order.
        data: Data for the scripts.
        **fields: Fields of the template, which escapes them.
    """
    sources = folder("templates") / _FOLDER
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(sources),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    environment.filters.update(breakable=breakable)  # pyright: ignore[reportUnknownMemberType]
    return environment.get_template(template).render(
        data=packed(data),
        style=Markup((sources / "style.css").read_text(encoding="utf-8")),
        scripts=[Markup((sources / name).read_text(encoding="utf-8")) for name in (*FIRST_SCRIPTS, *scripts)],
        **fields,
    )


def breakable(text: str) -> Markup:
    """Return escaped text in which a line may end after the joints of names, as in `memory.device=6GiB`."""
    return Markup("<wbr>").join(re.split(r"(?<=[=_+])(?=\w)|(?<=,)(?=[a-z])|(?<=[a-z]\.)(?=\w)", text))


def packed(data: Mapping[str, Any]) -> str:
    """Return deflated JSON for the inside of a script element; columns of a deep plan repeat themselves."""
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)
    return b64encode(zlib.compress(text.encode(), _LEVEL)).decode()


def _finite(data: Any) -> Any:
    """Replace numbers that are not finite by null, because JSON has none."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]  # pyright: ignore[reportUnknownVariableType]
    return data


def write_text(path: Path, text: str, option: str = "-o") -> None:
    """Write a page or another output whole or not at all.

    A path that is no ordinary file, such as /dev/stdout, is written in place.

    Args:
        path: File to write.
        text: Text.
        option: Option that named the file, for the message.

    Raises:
        MbcError: MBC320, the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            replace_file(path, (text.encode(),))
    except (OSError, ValueError) as error:
        raise _unwritten(path, error, option) from error


def check_writable(path: Path, option: str = "-o") -> None:
    """Raise MBC320 if `write_text` could not write; called before long work."""
    try:
        if not path.parent.is_dir():
            raise OSError("its folder does not exist")
        try_replacing(path)
    except (OSError, ValueError) as error:  # ValueError: an impossible path
        raise _unwritten(path, error, option) from error


def _unwritten(path: Path, error: Exception, option: str) -> MbcError:
    return MbcError("MBC320", f"cannot write '{path}': {why(error)}", f"name another file with {option}")
