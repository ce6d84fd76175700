"""Every code is explained once in docs/errors.md, stands for one kind of mistake, and nothing else is explained."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def _raised() -> dict[str, set[str]]:
    """Code -> files of mbc/ that name it in a string."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "mbc").rglob("*.py")):
        for code in re.findall(r"""["'](MBC\d{3})["']""", path.read_text(encoding="utf-8")):
            found[code].add(path.relative_to(ROOT).as_posix())
    return found


def _explained() -> list[str]:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    return re.findall(r"^\| (MBC\d{3}) \|", text, re.MULTILINE)


def test_every_code_is_explained_once():
    explained = _explained()
    assert sorted(explained) == sorted(set(explained))
    assert explained == sorted(explained)
    assert set(_raised()) - set(explained) == set(), "raised but not in docs/errors.md"
    assert set(explained) - set(_raised()) == set(), "in docs/errors.md but raised nowhere"


def test_a_code_belongs_to_one_part_of_the_compiler():
    # One kind of mistake may be found in several places, but not in two parts that know nothing of each other.
    for code, files in _raised().items():
        parts = {file.split("/")[1] for file in files}
        assert len(parts) == 1, f"{code} is raised in {sorted(files)}"


def test_every_code_has_a_test():
    tests = "".join(
        path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "tests").rglob("*"))
        if path.is_file() and path.suffix in (".py", ".txt") and path != Path(__file__)
    )
    assert {code for code in _raised() if code not in tests} == set(), "no test names these codes"
