"""Digests of the code that produced a result: kernels by family, operations, planner and imports.

A change without effect on results does not change a digest: comments, docstrings and layout of Python and C++ are left
out, and so are texts for people. Equal code has equal digests on every machine and under every Python that mbc
supports.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import cast

from mbc.resources import folder

_PACKAGE = Path(__file__).resolve().parent
FAMILIES = ("attention", "conv", "fp32_emulated", "fused", "norm", "pointwise", "pool", "update")
# Each family of mbc's own kernels has a folder of sources and a folder of Python; "kernels" is what all of them share.
# The first part of a path is a folder of resources or of the package.
_PARTS: Mapping[str, tuple[str, ...]] = {
    "kernels": ("templates", "kernels"),
    **{f"kernels/{family}": (f"templates/kernels/{family}", f"kernels/cuda/{family}") for family in FAMILIES},
    "operations": ("ir", "ops", "passes"),
    "planner": ("grammar", "frontend", "optimize", "plan", "hardware", "profile", "data", "compiler.py"),
    "imports": ("interchange",),
    "runtime": ("codegen", "runtime", "train"),
}
_RESOURCES = frozenset({"templates", "grammar"})
_CPP = frozenset({".cu", ".cuh", ".cpp", ".h", ".cpp.j2"})
# A comment, white space, a number (its ' is no quote), a word, a literal, or signs, of which some mean more together.
_CPP_TOKEN = re.compile(
    r"(?P<nothing>//[^\n]*|/\*.*?\*/|\{#.*?#\}|\s+)"
    r"|\d(?:[\w.]|'\w)*|\w+|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|[-+&|<>=]+|.",
    re.DOTALL,
)
_DIGITS = 16


def digests() -> dict[str, str]:
    """Return the digest of each part of the mbc that is imported, 16 hexadecimal digits each."""
    return dict(_digests())


@cache
def _digests() -> tuple[tuple[str, str], ...]:
    # Once per process: most likely it runs the files that were there when it began.
    return tuple((part, digest_of(files_of(part))) for part in _PARTS)


def files_of(part: str) -> dict[str, Path]:
    """Return the files of a part by their names in the project, without those of parts within it."""
    files: dict[str, Path] = {}
    for place in _PARTS[part]:
        head, *rest = place.split("/")
        top = folder(head) if head in _RESOURCES else _PACKAGE / head
        root = top.joinpath(*rest)
        for path in (root,) if root.is_file() else root.rglob("*"):
            if path.is_file() and path.suffix != ".md" and "__pycache__" not in path.parts:
                files[path.relative_to(top.parent).as_posix()] = path
    within = tuple(f"{place}/" for name, places in _PARTS.items() if name.startswith(f"{part}/") for place in places)
    return {name: path for name, path in files.items() if not name.startswith(within)}


def digest_of(files: Mapping[str, Path]) -> str:
    """Return the digest of files, by the names that they have in the project."""
    digest = hashlib.sha256()
    for name in sorted(files):
        content = hashlib.sha256(meaning(name, files[name].read_bytes())).hexdigest()
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()[:_DIGITS]


def meaning(name: str, content: bytes) -> bytes:
    """Return the part of a file that decides what it does: code of Python and C++, values of JSON, else everything."""
    kind = "".join(Path(name).suffixes)
    if kind == ".py":
        return "\n".join(_python(ast.parse(content))).encode()
    if kind in _CPP:
        tokens = (m for m in _CPP_TOKEN.finditer(content.decode()) if m["nothing"] is None)
        return "\n".join(m[0] for m in tokens).encode()
    if kind == ".json":
        return json.dumps(json.loads(content), sort_keys=True).encode()
    return content


def _python(node: ast.AST) -> Iterator[str]:
    """Yield the syntax tree, one line for each node.

    `ast.dump` differs between versions of Python. Fields that are empty, or that older versions lack, are left out.
    """
    yield type(node).__name__
    for field, value in ast.iter_fields(node):
        if field in {"ctx", "type_comment", "kind"}:
            continue
        if isinstance(node, ast.Constant):
            yield f"{type(value).__name__} {value!r}"
        elif isinstance(value, ast.AST):
            yield f".{field}"
            yield from _python(value)
        elif isinstance(value, list):
            items = cast(list[object], value)
            for item in items[1:] if field == "body" and _has_docstring(node) else items:
                yield f".{field}"
                yield from _python(item) if isinstance(item, ast.AST) else (repr(item),)
        elif value is not None:
            yield f".{field} {value!r}"
    yield "end"


def _has_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    )
