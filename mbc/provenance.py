"""Digests of the code that produced a result: kernels by family, operations, planner, imports and runtime.

A change that cannot change a result does not change a digest. Digests leave out comments, docstrings, layout, messages
of errors, and the names of files and identifiers. An identifier counts only by the order in which the identifiers of a
part appear first. Names that the project does not define (builtins, other packages, keywords and library calls of C++)
count as they are. Equal code has equal digests on every machine and under every Python that mbc supports.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import cast

from mbc.resources import folder

_PACKAGE = Path(__file__).resolve().parent
FAMILIES = ("attention", "conv", "fp32_emulated", "fused", "generated", "norm", "pointwise", "pool", "update")
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
_LEFT_OUT = ("templates/report/", "templates/completions/")  # pages and shells: no result depends on them
_RESOURCES = frozenset({"templates", "grammar"})
_CPP = frozenset({".cu", ".cuh", ".cpp", ".h", ".cpp.j2", ".cu.j2"})
# A comment, an include of the project, white space, a number (its ' is no quote), a word, a literal, or signs, of which
# some mean more together.
_CPP_TOKEN = re.compile(
    r"(?P<nothing>//[^\n]*|/\*.*?\*/|\{#.*?#\}|#include\s+\"[^\"\n]*\"|\s+)"
    r"|(?P<number>\d(?:[\w.]|'\w)*)|(?P<word>\w+)|(?P<text>\"(?:\\.|[^\"\\\n])*\")|'(?:\\.|[^'\\\n])*'|[-+&|<>=]+|.",
    re.DOTALL,
)
_CPP_MESSAGE = re.compile(r"\"[^\"%;{}]* [^\"%;{}]*\"")  # assembly has other signs
_CPP_KEYWORDS = re.compile(
    r"alignas|alignof|asm|auto|bool|break|case|catch|char|class|const|constexpr|continue|decltype|default|delete|do|double"
    r"|else|enum|explicit|extern|false|float|for|friend|goto|half|if|inline|long|mutable|namespace|new|noexcept|nullptr"
    r"|operator|private|public|return|short|signed|size_t|sizeof|static|static_assert|static_cast|struct|switch|template"
    r"|this|throw|true|try|typedef|typename|u?int(?:\d+_t)?|union|unsigned|using|virtual|void|volatile|while"
)
_BUILTINS = frozenset(dir(builtins))
_NAME = "\0"  # begins a token that is an identifier of the project
_DIGITS = 16


def digests(root: Path | None = None) -> dict[str, str]:
    """Return the digest of each part, 16 hexadecimal digits each.

    Args:
        root: A checkout; the default is the mbc that is imported.
    """
    if root is not None:
        return {part: digest_of(files_of(part, root).values()) for part in _PARTS}
    return dict(_digests())


@cache
def _digests() -> tuple[tuple[str, str], ...]:
    # Once a process: the files may change later, and the code that runs is the earlier one.
    return tuple((part, digest_of(files_of(part).values())) for part in _PARTS)


def files_of(part: str, root: Path | None = None) -> dict[str, Path]:
    """Return the files of a part by their names in the project, without those of parts within it.

    Args:
        part: Name of the part.
        root: A checkout; the default is the mbc that is imported.
    """
    files: dict[str, Path] = {}
    for place in _PARTS[part]:
        head, *rest = place.split("/")
        if head in _RESOURCES:
            top = root / head if root else folder(head)
        else:
            top = (root / "mbc" if root else _PACKAGE) / head
        start = top.joinpath(*rest)
        for path in (start,) if start.is_file() else start.rglob("*"):
            if path.is_file() and path.suffix != ".md" and "__pycache__" not in path.parts:
                files[path.relative_to(top.parent).as_posix()] = path
    within = tuple(f"{place}/" for name, places in _PARTS.items() if name.startswith(f"{part}/") for place in places)
    return {name: path for name, path in files.items() if not name.startswith((*within, *_LEFT_OUT))}


def digest_of(files: Iterable[Path]) -> str:
    """Return the digest of files, whatever their names and their order."""
    contents = sorted((tokens(path.name, path.read_bytes()) for path in files), key=lambda one: _numbered(one, {}))
    numbers: dict[str, int] = {}
    digest = hashlib.sha256()
    for content in contents:
        digest.update(_numbered(content, numbers).encode())
    return digest.hexdigest()[:_DIGITS]


def _numbered(content: Iterable[str], numbers: dict[str, int]) -> str:
    """Return the digest of tokens with identifiers as numbers, and add identifiers that are new to `numbers`."""
    lines = (f"#{numbers.setdefault(token, len(numbers))}" if token[0] == _NAME else token for token in content)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def tokens(name: str, content: bytes) -> list[str]:
    """Return the part of a file that decides what it does; identifiers of the project begin with a zero byte.

    These are the syntax tree of Python, the tokens of C++, the values of JSON, and everything of other files.
    """
    kind = "".join(Path(name).suffixes)
    if kind == ".py":
        return _Python(ast.parse(content)).tokens
    if kind in _CPP:
        return list(_cpp(content.decode()))
    if kind == ".json":
        return [json.dumps(json.loads(content), sort_keys=True)]
    return [hashlib.sha256(content).hexdigest()]


def _cpp(text: str) -> Iterator[str]:
    """Yield the tokens of C++.

    Functions that the file calls but does not define keep their names: libraries define most of them.
    """
    matches = [match for match in _CPP_TOKEN.finditer(text) if match["nothing"] is None]
    called: set[str] = set()
    defined: set[str] = set()
    for before, match, after in zip([None, *matches], matches, matches[1:], strict=False):
        if match["word"] and after[0] == "(":
            typed = (
                before is not None and before["word"] and before[0] not in ("return", "else", "case", "throw", "new")
            )
            (defined if typed else called).add(match[0])
    member = False
    for match in matches:
        word, before_is_dot, member = match["word"], member, match[0] in (".", "->")
        if word and not (_CPP_KEYWORDS.fullmatch(word) or word.startswith("__") or word in called - defined):
            yield f"{_NAME}.{word}" if before_is_dot else _NAME + word
        elif match["text"] is None or not _CPP_MESSAGE.fullmatch(match[0]):
            yield match[0]


class _Python:
    """The syntax tree of a Python file as `tokens`: one for each node and each of its values.

    `ast.dump` differs between versions of Python. Fields that are empty, or that older versions lack, are left out.
    Imports of the project only give names, which order them, so they are left out, too. Local names of a function are
    other identifiers than equal names elsewhere; attributes and names of a class are apart from variables.
    """

    def __init__(self, tree: ast.Module) -> None:
        """Read a file."""
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        outside = [node for node in imports if not _of_project(node)]
        self._outside = {alias.asname or alias.name.split(".")[0] for node in outside for alias in node.names}
        self._scopes: list[tuple[str, set[str]]] = []  # what begins the names of a scope, and the names
        self._functions = 0
        self.tokens = sorted({ast.unparse(node) for node in outside})
        self._add(tree)

    def _add(self, node: ast.AST) -> None:
        """Add the tokens of a node."""
        if isinstance(node, ast.Import | ast.ImportFrom):
            return
        tokens = self.tokens
        tokens.append(type(node).__name__)
        if isinstance(node, ast.Constant):
            tokens.append(f"{type(node.value).__name__} {node.value!r}")
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            tokens.append(self._name(node, node.name))
        scoped = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda)
        if scoped:
            self._functions += 1
            prefix = "." if isinstance(node, ast.ClassDef) else f"{self._functions} "
            self._scopes.append((prefix, _bound(node)))
        for field, value in ast.iter_fields(node):
            if field in {"ctx", "type_comment", "kind"} or value is None or value == [] or (scoped and field == "name"):
                continue
            if isinstance(node, ast.Assert) and field == "msg":
                continue  # messages of errors change no result
            if isinstance(node, ast.Raise) and isinstance(value, ast.Call):
                value = value.func
            tokens.append(f".{field}")
            if isinstance(value, list):
                items = cast(list[object], value)
                for item in items[1:] if field == "body" and _has_docstring(node) else items:
                    self._add_value(node, item)
            else:
                self._add_value(node, value)
        if scoped:
            self._scopes.pop()
        tokens.append("end")

    def _add_value(self, node: ast.AST, value: object) -> None:
        if isinstance(value, ast.AST):
            self._add(value)
        else:
            self.tokens.append(self._name(node, value) if isinstance(value, str) else repr(value))

    def _name(self, node: ast.AST, name: str) -> str:
        """Return the token of a name in a node."""
        if isinstance(node, ast.Attribute):
            return name if self._is_outside(node) or name.startswith("__") else f"{_NAME}.{name}"
        if isinstance(node, ast.keyword):
            return f"{_NAME}={name}"
        for depth, (prefix, bound) in enumerate(reversed(self._scopes)):
            if name in bound and (prefix != "." or not depth):  # methods do not see the names of their class
                return _NAME + prefix + name
        return name if name in _BUILTINS or name in self._outside or name.startswith("__") else _NAME + name

    def _is_outside(self, node: ast.expr) -> bool:
        """Return whether an expression is an attribute of another package."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self._outside


def _bound(scope: ast.AST) -> set[str]:
    """Return the names that a function or a class binds, without those inside of functions in it."""
    names: set[str] = set()
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
        waiting += ast.iter_child_nodes(node)
    return {name for name in names if not name.startswith("__")}


def _of_project(node: ast.Import | ast.ImportFrom) -> bool:
    """Return whether a file of mbc is imported."""
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return any(module.split(".")[0] == "mbc" for module in modules) or getattr(node, "level", 0) > 0


def _has_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    )
