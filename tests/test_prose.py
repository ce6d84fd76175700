"""Docstrings are sentences that stand alone, and names say what a thing is. `python tests/test_prose.py` lists faults.

ruff's rules `D` hold the form of docstrings. The tests here hold what ruff lets pass.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("mbc", "benchmarks", "docs", "examples", "tests")

# A docstring that begins with one of these leans on the docstring before it, or is no sentence.
FRAGMENTS = re.compile(r"(?:Of|As|By|With|Where|What|Whether|Likewise|The same)\b")
# The docstring of a function begins with a verb in the imperative, so with none of these.
NO_VERBS = re.compile(
    r"(?:The|An?|All|Each|Every|Both|Any|Some|One|Its?|In|On|At|For|From|To|How|Which|Whose|When|If|That|Those|This|These"
    r"|No|Not|Nothing|Only|True|False|Bytes|Returns|Raises|Yields)\b"
)
NAMES = frozenset({"found", "worth", "told", "lies", "made", "known"})  # of nothing in particular

Function = ast.FunctionDef | ast.AsyncFunctionDef


def faults(path: Path) -> Iterator[str]:
    """Yield the faults of one file, each with its line."""
    tests = path.is_relative_to(ROOT / "tests")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node) or ""
            if FRAGMENTS.match(text):
                yield f"{place}: a docstring is a sentence that stands alone: '{_first(text)}'"
            elif not tests and isinstance(node, Function) and not _is_value(node) and NO_VERBS.match(text):
                yield f"{place}: a docstring says what the function does, in the imperative: '{_first(text)}'"
        if (name := _bound(node)) in NAMES:
            yield f"{place}: '{name}' does not say what the thing is"


def _first(text: str) -> str:
    return text.partition("\n")[0]


def _is_value(function: Function) -> bool:
    """Return whether callers read the function as a value: a property, or a fixture."""
    return any("property" in ast.unparse(one) or "fixture" in ast.unparse(one) for one in function.decorator_list)


def _bound(node: ast.AST) -> str | None:
    """Return the name that a node gives to a variable, an argument or a function."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    return node.name if isinstance(node, Function) else None


def files(folder: str) -> list[Path]:
    """Return the Python files of a folder of the project."""
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_and_names_are_plain(folder: str) -> None:
    assert files(folder)
    assert not [fault for path in files(folder) for fault in faults(path)]


def test_faults_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "one.py"
    path.write_text(
        '"""Of two files, the first."""\ndef size(known: int) -> int:\n    """The bytes."""\n    made = 1\n'
        'class Region:\n    """The bytes."""\n    @property\n    def size(self) -> int:\n        """The bytes."""\n'
    )
    assert sorted(fault.partition(":")[2].partition(":")[0] for fault in faults(path)) == ["1", "2", "2", "4"]


if __name__ == "__main__":
    for each in sys.argv[1:] or FOLDERS:
        for line in (fault for path in files(each) for fault in faults(path)):
            print(line)
