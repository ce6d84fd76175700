"""Every source of tests/cases/bad is refused with the message beside it, word for word.

`pytest tests/frontend --update-expected` writes the messages anew: read the difference before committing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mbc.errors import MbcError
from mbc.frontend.parse import parse_setting
from mbc.source import Source
from tests.frontend.reading import CASES, lower_file

BAD = sorted((CASES / "bad").glob("*.mbc"))


@pytest.mark.parametrize("path", BAD, ids=[p.stem for p in BAD])
def test_message(path: Path, update_expected: bool):
    with pytest.raises(MbcError) as caught:
        lower_file(path)
    expected = path.with_suffix(".txt")
    message = f"{caught.value}\n"
    if update_expected:
        expected.write_text(message, encoding="utf-8")
    assert message == expected.read_text(encoding="utf-8")
    # Every message says where, unless the mistake stands on the command line, and what to do.
    error = caught.value
    assert error.remedy
    assert error.span is not None or error.code in ("MBC021", "MBC022", "MBC023")


@pytest.mark.parametrize(
    ("text", "message", "column", "length"),
    [
        ("(3", "this `(` is never closed", 1, 1),
        ("2 * (3", "this `(` is never closed", 5, 1),
        (")", "`)` cannot stand here", 1, 1),
        ("", "the end of the text cannot stand here", 1, 1),
        ("$", "`$` means nothing here", 1, 1),
        ("3 kb", "`kb` is not a unit", 3, 2),
    ],
)
def test_a_message_about_a_setting_points_at_its_first_character(text: str, message: str, column: int, length: int):
    with pytest.raises(MbcError) as caught:
        parse_setting(Source("--set batch", text))
    assert caught.value.message.startswith(message)
    assert caught.value.span is not None
    assert (caught.value.span.line, caught.value.span.column, caught.value.span.length) == (1, column, length)
