"""Every test asserts something; and `--shares` and the page on tests list every suite."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.shares import SUITES

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "tests").rglob("test_*.py"))
# Functions of the compiler that raise where what they are given is wrong.
VERIFIERS = {"verify_plan", "verify_network", "verify_training"}


@cache
def _functions(file: Path) -> dict[str, list[ast.FunctionDef]]:
    """Return the functions of a file by name, with methods, nested functions and those imported from other tests."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions: dict[str, list[ast.FunctionDef]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests."):
            module = ROOT / node.module.replace(".", "/")
            for alias in node.names:
                if module.is_dir():
                    functions |= _functions(module / f"{alias.name}.py")
                else:
                    functions[alias.asname or alias.name] = _functions(module.with_suffix(".py")).get(alias.name, [])
    return functions


def _called(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                yield name
            case _:
                pass


def _asserts(function: ast.FunctionDef, helpers: dict[str, list[ast.FunctionDef]], deep: int = 3) -> bool:
    """Return True if the function contains an assertion, or calls a helper of the tests that does."""
    if any(isinstance(node, ast.Assert) for node in ast.walk(function)):
        return True
    called = set(_called(function))
    if called & {"raises", "warns", *VERIFIERS} or any(name.startswith("assert_") for name in called):
        return True
    return deep > 0 and any(_asserts(f, helpers, deep - 1) for name in called for f in helpers.get(name, ()))


def test_no_test_is_without_an_assertion() -> None:
    without = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in FILES
        for name, functions in _functions(file).items()
        for function in functions
        if name.startswith("test_") and not _asserts(function, _functions(file))
    ]
    assert not without


@pytest.mark.parametrize(
    ("body", "asserts"),
    [("assert x", True), ("with pytest.raises(KeyError): {}[1]", True), ("verify_plan(x)", True), ("print(x)", False)],
)
def test_an_assertion_is_found(body: str, asserts: bool) -> None:
    (function,) = ast.parse(f"def test_it(x):\n    {body}\n").body
    assert isinstance(function, ast.FunctionDef)
    assert _asserts(function, {}) is asserts


def test_every_suite_has_its_line_in_the_table_of_shares() -> None:
    folders = {file.relative_to(ROOT / "tests").parts[0] for file in FILES if file.parent != ROOT / "tests"}
    assert folders | {"the whole"} == set(SUITES)


def test_the_page_on_tests_explains_every_suite() -> None:
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, re.MULTILINE) == sorted(SUITES.items())
