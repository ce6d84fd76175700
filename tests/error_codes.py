"""The words with which mbc raises each code, and the tests that assert these words, both read from the sources.

A test covers a code if it names the code together with words of its message: both in the body of one test, in one row
of a table that a test reads, or in one expected output of tests/cases/bad, which is compared as a whole. Words count if
the function in mbc/ that raises the code has them, so that any other text beside a code does not count.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = re.compile(r"MBC\d{3}")
LEAST_WORDS = 10  # characters that a test and a message must have in common, or all of a shorter part of a message

Functions = (ast.FunctionDef, ast.AsyncFunctionDef)


def raised() -> dict[str, dict[str, list[str]]]:
    """Return for each code and each file of mbc/ that raises it the words of its messages.

    The words are all texts of the innermost function around the code. If that function passes the code on without a
    message beside it, they are all texts of the folder.
    """
    words_of: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted((ROOT / "mbc").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not CODE.search(text):
            continue
        tree = ast.parse(text)
        for scope in (tree, *(node for node in ast.walk(tree) if isinstance(node, Functions))):
            texts = list(_texts(scope))
            for code in filter(CODE.fullmatch, texts):
                words = texts if _is_with_message(scope, code) else _all_texts(path.parent)
                words_of[code][path.relative_to(ROOT).as_posix()] += [w for w in words if not CODE.fullmatch(w)]
    return words_of


@cache
def _all_texts(folder: Path) -> list[str]:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.py")))
    scopes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.Module, *Functions)))
    return list(dict.fromkeys(text for scope in scopes for text in _texts(scope)))


def _is_with_message(scope: ast.AST, code: str) -> bool:
    calls = (node for node in ast.walk(scope) if isinstance(node, ast.Call))
    return any(
        isinstance(first, ast.Constant) and first.value == code and "Error" in ast.unparse(call.func)
        for call in calls
        for first in call.args[:1]
    )


def vouched(words_of: dict[str, list[str]]) -> dict[str, set[str]]:
    """Return for each code the tests that assert it with words of its message. `words_of`: words by code."""
    tests_of: dict[str, set[str]] = defaultdict(set)
    to_share = {code: _to_share(words) for code, words in words_of.items()}
    for path in sorted((ROOT / "tests" / "cases" / "bad").glob("*.txt")):
        first = re.match(r"error (MBC\d{3}): ", path.read_text(encoding="utf-8"))
        if first is not None:
            tests_of[first[1]].add(path.name)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "gpu" in path.relative_to(ROOT).parts:
            continue  # not run where there is no GPU
        text = path.read_text(encoding="utf-8")
        for name, texts in _groups(ast.parse(text)) if CODE.search(text) else ():
            for code in {code for text in texts for code in CODE.findall(text)}:
                if any(_shares(text, to_share.get(code, set())) for text in texts):
                    tests_of[code].add(f"{path.relative_to(ROOT).as_posix()}::{name}")
    return tests_of


def _groups(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield the texts that a test asserts together: those of its body, or those of one row of a table that it reads."""
    tables = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not (isinstance(node, Functions) and node.name.startswith("test_")):
            continue
        body = [statement for statement in node.body if not _is_docstring(statement)]
        yield node.name, [text for statement in body for text in _texts(statement)]
        read: list[ast.AST] = [*node.decorator_list, *body]
        for name in {n.id for part in read for n in ast.walk(part) if isinstance(n, ast.Name)} & tables.keys():
            read.append(tables[name])
        rows = [row for part in read for row in _rows(part)]
        for row in rows:
            yield node.name, list(_texts(row))
        if not any(row for part in read[len(node.decorator_list) + len(body) :] for row in _rows(part)):
            # Tables of messages without codes: the code that the body names is that of all rows.
            yield node.name, [text for part in read for text in _texts(part)]


def _rows(part: ast.AST) -> Iterator[ast.AST]:
    """Yield every innermost tuple, list, call or pair of a dict that contains a code."""
    for node in ast.walk(part):
        if isinstance(node, ast.Dict):
            yield from (ast.Tuple([k, v], ast.Load()) for k, v in zip(node.keys, node.values, strict=True) if k)
        if not isinstance(node, ast.Tuple | ast.Call | ast.List):
            continue
        coded = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.Constant | ast.JoinedStr)]
        if any(CODE.search(text) for child in coded for text in _texts(child)):
            yield node


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the strings in a node, and the parts of f-strings between the braces.

    Nested functions and docstrings are left out.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Functions) or (isinstance(child, ast.stmt) and _is_docstring(child)):
            continue
        yield from _texts(child)


def _shares(text: str, words: set[str]) -> bool:
    """Return True if the text contains any of the words that `_to_share` returned."""
    plain = CODE.sub("", text).replace("\\", "")  # as in a pattern
    return not words.isdisjoint(_windows(plain)) or any(len(w) < LEAST_WORDS and w in plain for w in words)


def _to_share(words: list[str]) -> set[str]:
    """Return the substrings of which a text must contain one: windows of a fixed length, or all of a shorter word."""
    short = {part.strip() for part in words if LEAST_WORDS > len(part.strip()) > 5}
    return short.union(*map(_windows, words))


def _windows(text: str) -> set[str]:
    return {text[start : start + LEAST_WORDS] for start in range(len(text) - LEAST_WORDS + 1)}
