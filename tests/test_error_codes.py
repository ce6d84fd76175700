"""Error codes: docs/errors.md explains each code once, and each code stands for one kind of mistake.

For each code, a test asserts the code with words of its message.
"""

from __future__ import annotations

import ast
import re

import pytest

from tests import error_codes
from tests.error_codes import ROOT, raised, vouched


@pytest.fixture(scope="module")
def codes() -> dict[str, dict[str, list[str]]]:
    return raised()


def _explained() -> list[list[str]]:
    """Return the codes of docs/errors.md by section, in the order of the page."""
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    return [re.findall(r"^\| (MBC\d{3}) \|", section, re.MULTILINE) for section in text.split("\n## ")]


def test_every_code_is_explained_once(codes):
    sections = _explained()
    explained = [code for section in sections for code in section]
    assert sorted(explained) == sorted(set(explained))
    assert sections == [sorted(section) for section in sections]
    assert set(codes) - set(explained) == set(), "raised but not in docs/errors.md"
    assert set(explained) - set(codes) == set(), "in docs/errors.md but raised nowhere"


def test_a_code_belongs_to_one_part_of_the_compiler(codes):
    # One kind of mistake may be found at more than one place, but not in two parts that know nothing of each other.
    for code, files in codes.items():
        parts = {file.split("/")[1] for file in files}
        assert len(parts) == 1, f"{code} is raised in {sorted(files)}"


def test_a_test_asserts_every_code_with_words_of_its_message(codes):
    words = {code: [text for texts in files.values() for text in texts] for code, files in codes.items()}
    tests_of = vouched(words)
    assert {code for code in words if not tests_of[code]} == set(), "no test asserts these codes and their messages"


@pytest.mark.parametrize(
    ("test", "vouches"),
    [
        ("assert error.code == 'MBC900' and 'reaches the far end' in error.message", True),
        ("with pytest.raises(MbcError, match=r'MBC900: .* reaches the far'): pass", True),
        ("assert error.code == 'MBC900'", False),
        ("assert error.code == 'MBC900' and 'something else altogether' in error.message", False),
        ("'''MBC900: a pipe that reaches the far end'''", False),
        ("pass  # MBC900: a pipe that reaches the far end", False),
        ("assert 'MBC901' in text\n    assert 'reaches the far end' in text", False),
    ],
)
def test_definition_of_a_test_of_a_code(monkeypatch, tmp_path, test, vouches):
    (tmp_path / "mbc").mkdir()
    (tmp_path / "mbc" / "pipes.py").write_text(
        "def lay(pipe):\n    raise MbcError('MBC900', f'a pipe {pipe} reaches the far end', 'cut it')\n"
        "def other():\n    return 'something else altogether'\n"
    )
    (tmp_path / "tests" / "cases" / "bad").mkdir(parents=True)
    (tmp_path / "tests" / "test_pipes.py").write_text(f"def test_pipes():\n    {test}\n")
    monkeypatch.setattr(error_codes, "ROOT", tmp_path)
    words = {code: [text for texts in files.values() for text in texts] for code, files in raised().items()}
    assert set(words) == {"MBC900"}
    assert bool(vouched(words)["MBC900"]) == vouches


def test_rows_of_tables_count_each_by_itself():
    row = "CASES = [('MBC900', 'reaches the far end'), ('MBC901', 'another')]\n"
    tree = ast.parse(row + "@pytest.mark.parametrize('case', CASES)\ndef test_pipes(case):\n    assert case\n")
    groups = [texts for _, texts in error_codes._groups(tree)]
    assert ["MBC900", "reaches the far end"] in groups
    assert not any({"MBC901", "reaches the far end"} <= set(texts) for texts in groups)
