"""Lists in pages that follow from the declarations of operations.

`pytest tests/ops/test_declarations.py --update-expected` writes the lists anew.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

import pytest

from mbc.interchange.aten.renamings import RENAMINGS
from mbc.ops import POINTWISE
from tests.frontend.reading import ROOT


def _pointwise() -> str:
    rows = ["| function | gradient reads | meaning |", "| --- | --- | --- |"]
    for name, function in POINTWISE.items():
        settings = f" ({', '.join(f'`{setting}`' for setting in function.settings)})" if function.settings else ""
        meaning = function.help or f"`{function.device[0]}`"
        rows.append(f"| `{name}`{settings} | {'y' if function.of_output else 'x'} | {meaning} |")
    return "\n".join(rows)


def _renamings() -> str:
    shown: list[str] = []
    for target, renamings in sorted(RENAMINGS.items()):
        name, layers = target.split(".")[1], [renaming.layer for renaming in renamings]
        behind = "" if layers == [name] else f" → {' or '.join(f'`{layer}`' for layer in layers)}"
        shown.append(f"`{name}`{behind}")
    return textwrap.fill(", ".join(shown) + ".", 120, break_on_hyphens=False)


@pytest.mark.parametrize(("page", "content"), [("operations", _pointwise), ("import", _renamings)])
def test_lists_of_pages(page: str, content: Callable[[], str], update_expected: bool) -> None:
    path = ROOT / "docs" / f"{page}.md"
    pattern = re.compile(rf"(<!-- {content.__name__.strip('_')} -->\n).*?(<!-- end -->)", re.DOTALL)
    text = path.read_text(encoding="utf-8")
    expected, count = pattern.subn(lambda match: f"{match[1]}{content()}\n{match[2]}", text)
    if update_expected:
        path.write_text(expected, encoding="utf-8")
    assert (count, path.read_text(encoding="utf-8")) == (1, expected)
