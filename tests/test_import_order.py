"""The order of imports: one order of packages, no circle of files or packages, and an index in every package.

Every import counts: at the top of a file, inside a function, and for type checking. There are no exceptions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "mbc"

# Lowest first: a file imports only from its own room and from rooms before it in this list, whether at its top, inside
# a function or for type checking alone. A room is a package or a file; ARCHITECTURE.md describes each. In the order of
# the lines, the rooms are for what every file may use, for the machine and the meaning of operations, for the way from
# a source to a plan and its results, for decisions, and for entry points.
ROOMS = """
    version source units errors files resources options collection provenance progress stages ranks
    hardware ir ops passes kernels
    frontend profile plan codegen runtime analysis measure record train interchange equivalence
    optimize.effort optimize.candidates optimize.fusion optimize.selection optimize.schedule optimize.placement
    optimize.remat optimize.bounds optimize.search optimize
    measuring constraints planner compiler fit ablation tune bench pytorch report editor cli __main__
"""
ORDER = (*(f"mbc.{room}" for room in ROOMS.split()), "mbc")


@dataclass(frozen=True, slots=True)
class Import:
    """One import of a module of mbc by another module, at any place of the file."""

    importer: str
    imported: str


@cache
def modules() -> Mapping[str, Path]:
    """Return every file of mbc by the name of its module; a package is its `__init__`."""
    paths: dict[str, Path] = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imports_of(name: str, text: str, names: Container[str]) -> Iterator[Import]:
    """Yield the imports of modules in `names` by a module, those in functions and for type checking included."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (Import(name, alias.name) for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name} imports relatively"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in names or node.module in names:
                    yield Import(name, inner if inner in names else node.module)


@cache
def imports() -> tuple[Import, ...]:
    """Return all imports between modules of mbc."""
    return tuple(i for name, path in modules().items() for i in imports_of(name, path.read_text(), modules()))


def edges(pairs: Iterable[tuple[str, str]]) -> Mapping[str, Sequence[str]]:
    """Return the graph with these edges, without those from a node to itself."""
    targets: dict[str, list[str]] = {}
    for start, stop in pairs:
        if start != stop:
            targets.setdefault(start, []).append(stop)
    return targets


def circle(graph: Mapping[str, Sequence[str]]) -> list[str]:
    """Return some circle of a graph, its first node also at the end; empty if there is none."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for target in graph.get(name, ()):
            if nodes := walk(target, [*path, name]):
                return nodes
        done.add(name)
        return []

    for name in sorted(graph):
        if nodes := walk(name, []):
            return nodes
    return []


def room(name: str) -> int:
    """Return the index of a module's package in ORDER: that of the longest entry with which its name begins."""
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    entry = next(prefix for prefix in prefixes if prefix in ORDER)
    assert entry != "mbc" or name == "mbc", f"{name} is in no room: give it one in ORDER"
    return ORDER.index(entry)


def upward(some: Iterable[Import]) -> list[str]:
    """Return the imports against the order, as text."""
    return [f"{i.importer} -> {i.imported}" for i in some if room(i.imported) > room(i.importer)]


def test_every_file_has_a_room_and_every_room_a_file():
    assert {ORDER[room(name)] for name in modules()} == set(ORDER)


def test_imports_follow_the_order():
    assert upward(imports()) == []


def test_no_file_imports_itself_by_way_of_others():
    assert circle(edges((i.importer, i.imported) for i in imports())) == []


@pytest.mark.parametrize("depth", (2, 3, 4))
def test_no_package_imports_itself_by_way_of_others(depth: int):
    """Check the packages of one depth: 2 for those of `mbc`, 3 and 4 for those inside them."""

    def package(name: str) -> str:
        return ".".join(name.split(".")[:depth])

    def has_depth(name: str) -> bool:
        return name.count(".") >= depth - 1

    deep = [i for i in imports() if has_depth(i.importer) and has_depth(i.imported)]
    pairs = ((package(i.importer), package(i.imported)) for i in deep)
    assert circle(edges(pairs)) == []


def test_a_circle_is_found():
    assert circle({"a": ["b", "d"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]
    assert circle({"a": ["b", "c"], "b": ["c"]}) == []


def test_imports_are_found_at_any_place():
    text = (
        "import m.a\nfrom m import b, VERSION\nif TYPE_CHECKING:\n  from m.c import C\ndef f():\n  from m.d import D\n"
        "import other"
    )
    imported = {i.imported for i in imports_of("m.e", text, {"m", "m.a", "m.b", "m.c", "m.d"})}
    assert imported == {"m.a", "m.b", "m", "m.c", "m.d"}


def test_an_import_against_the_order_is_found():
    against = Import("mbc.optimize.selection.select", "mbc.optimize.schedule.liveness")
    along = Import("mbc.passes.expand", "mbc.ops.base")
    assert upward([against, along]) == ["mbc.optimize.selection.select -> mbc.optimize.schedule.liveness"]


PACKAGES = [name for name, path in modules().items() if path.name == "__init__.py"]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_its_index(package: str):
    path = modules()[package]
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    named = re.findall(r"^\* `(\w+)`: \S", text, re.MULTILINE)
    inside = {name.rsplit(".", 1)[1] for name in modules() if name.rpartition(".")[0] == package}
    assert sorted(named) == sorted(inside)
    rooms = [room(f"{package}.{name}") for name in named]
    assert rooms == sorted(rooms), "the index is not in the order of imports"
    assert len(text.splitlines()[0]) > 7  # what it is for
