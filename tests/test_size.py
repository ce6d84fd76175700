"""The code has a ceiling: lines of code of the four large folders, without blank lines, comments and docstrings.

The ceiling falls when lines go. It rises only in a commit that closes an issue which names a number.
`python tests/test_size.py` prints the lines of each folder.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("mbc", "templates", "tests", "benchmarks")
DATA = {".json", ".jsonl", ".md", ".txt", ".toml", ".csv", ".png", ".svg", ".npz", ".onnx", ".pyc", ".gz"}
CEILING = 162_084
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*|\{#.*?#\}", re.DOTALL)


def python_lines(text: str) -> int:
    """Return the lines of code of a Python file."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstrings |= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for n, line in lines if n not in docstrings)


def other_lines(text: str) -> int:
    """Return the lines of code of a file in C++, CUDA, JavaScript or a template of these."""
    return sum(bool(line.strip()) for line in COMMENT.sub("", text).splitlines())


def lines_of(folder: str) -> int:
    """Return the lines of code in a folder of the project; files of data do not count."""
    paths = [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix not in DATA]
    paths = [path for path in paths if not {"cases", "corpus", "__pycache__"} & set(path.relative_to(ROOT).parts)]
    count = {path: python_lines if path.suffix == ".py" else other_lines for path in paths}
    return sum(count[path](path.read_text(encoding="utf-8")) for path in paths)


def test_the_code_stays_below_its_ceiling() -> None:
    assert sum(map(lines_of, FOLDERS)) <= CEILING


def test_comments_and_docstrings_are_free() -> None:
    assert (
        python_lines('"""A file.\n\nMore.\n"""\n\n# why\nx = 1  # one\n\ndef f():\n    """Return."""\n    return x\n')
        == 3
    )
    assert other_lines("// a\nint x; // b\n/* c\n d */\n\n{# e #}\nint y;\n") == 2


if __name__ == "__main__":
    print(", ".join(f"{folder} {lines_of(folder):,}" for folder in FOLDERS))
