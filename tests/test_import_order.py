"""Who may import whom: one order of packages, no circle between files, and an index in every package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "mbc"

# Lowest first: a file imports from its own room and from those named before it. A room is a package or a file, and
# the longest name that a file's own begins with is its room: where a package is in two rooms the comment says why.
ORDER = (
    "mbc",  # its version
    # What everybody may use.
    "mbc.source",  # texts and places in them
    "mbc.errors",  # point at sources
    "mbc.units",
    "mbc.files",  # that a user names
    "mbc.resources",  # where templates, grammar and data lie
    "mbc.options",  # all that a compilation can be told
    "mbc.aliases",  # old names in data
    "mbc.collection",  # of garbage
    "mbc.provenance",  # digests of the code
    "mbc.ranks",  # processes of one training
    "mbc.progress",  # what is shown meanwhile
    # Meaning.
    "mbc.ir",  # graphs and types, which operations are written in
    "mbc.ops",  # meaning, shapes and gradients of operations
    "mbc.ir.build",  # in two rooms: what makes, checks and rewrites graphs asks operations for shapes and gradients
    "mbc.ir.verify",
    "mbc.ir.transforms",
    "mbc.frontend",  # source text -> network
    # Machine.
    "mbc.plan.model",  # apart from its package: plain data, whose streams and layouts the rooms below name, too
    "mbc.hardware",  # GPUs and links
    "mbc.kernels",  # what runs operations on them
    "mbc.plan",  # encoded, decoded and verified against kernels
    "mbc.codegen",  # plan -> package
    "mbc.runtime",  # package -> steps
    "mbc.profile",  # measured times of kernels
    "mbc.measure",  # fills profiles, by generated code
    "mbc.analysis",  # a plan beside limits of the hardware
    # Decisions.
    "mbc.optimize.effort",  # tuning constants
    "mbc.optimize.candidates",
    "mbc.optimize.fusion",
    "mbc.optimize.selection",
    "mbc.optimize.schedule",
    "mbc.optimize.placement",
    "mbc.optimize.remat",
    "mbc.optimize.bounds",
    "mbc.optimize.search",
    "mbc.optimize",  # nothing but its index
    # Entry points.
    "mbc.measuring",  # measures what a search will ask for
    "mbc.constraints",  # what a search may use
    "mbc.stages",  # named and timed
    "mbc.compiler",  # all of them
    "mbc.fit",  # many compilations
    "mbc.ablation",
    "mbc.record",  # steps timed node by node
    "mbc.train",  # many steps
    "mbc.tune",  # which batch to train at, and at which rate
    "mbc.interchange",  # files of other frameworks -> source and weights
    "mbc.pytorch",  # steps in a loop of PyTorch
    "mbc.equivalence",  # steps compared
    "mbc.bench",  # steps raced
    "mbc.report",  # what is printed of all that
    "mbc.editor",  # what an editor shows of a source
    "mbc.cli",
)

# Imports inside functions: they cost time or need what is not always installed. `mbc.cli` imports what a command does
# when it runs, so that help is instant; all others are named here, with the reason.
LAZY = {
    ("mbc", "mbc.pytorch.trainer"): "needs PyTorch",
    ("mbc.codegen.view", "mbc.kernels"): "only without providers of the caller's: a package is built by any",
    ("mbc.editor.line_times", "mbc.compiler"): "only in the process that plans",
    ("mbc.editor.line_times", "mbc.errors"): "only in the process that plans",
    ("mbc.editor.line_times", "mbc.options"): "only in the process that plans",
    ("mbc.editor.line_times", "mbc.plan.model"): "only in the process that plans",
    ("mbc.editor.line_times", "mbc.source"): "only in the process that plans",
    ("mbc.equivalence.launches", "mbc.equivalence.in_torch"): "needs PyTorch",
    ("mbc.fit", "mbc.report.html.notebook"): "only in a notebook",
    ("mbc.measure.kernel_library", "mbc.kernels"): "only without providers of the caller's",
    ("mbc.measuring", "mbc.measure.ladder"): "only where something is measured",
    ("mbc.measuring", "mbc.optimize.search.decisive_requests"): "only where something is measured",
    ("mbc.measuring", "mbc.optimize.search.profiling_requests"): "only where something is measured",
    ("mbc.plan.model", "mbc.report.html.notebook"): "only in a notebook",
    ("mbc.runtime.opening", "mbc.runtime.cuda"): "needs PyCUDA",
}

# The only imports against the order: a notebook asks an object (`_repr_html_`) how it is shown, and what shows it
# is above it.
SHOWN = {("mbc.fit", "mbc.report.html.notebook"), ("mbc.plan.model", "mbc.report.html.notebook")}


@dataclass(frozen=True, slots=True)
class Import:
    """`lazy`: inside a function."""

    importer: str
    imported: str
    lazy: bool


@cache
def modules() -> Mapping[str, Path]:
    """Every file of mbc by its module's name; a package is its `__init__`."""
    found: dict[str, Path] = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name: str, text: str, known: Mapping[str, object]) -> Iterator[Import]:
    """What a module imports of the `known` ones, for type checking only, too."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(name, alias.name, lazy) for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name} imports relatively"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in known or node.module in known:
                    yield Import(name, inner if inner in known else node.module, lazy)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(text), False)


@cache
def imports() -> tuple[Import, ...]:
    return tuple(i for name, path in modules().items() for i in imports_of(name, path.read_text(), modules()))


def circle(edges: Mapping[str, Sequence[str]]) -> list[str]:
    """Some circle, its start named twice; empty where there is none."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in edges.get(name, ()):
            if found := walk(other, [*path, name]):
                return found
        done.add(name)
        return []

    for name in sorted(edges):
        if found := walk(name, []):
            return found
    return []


def room(name: str) -> int:
    """The place in ORDER of a module's room."""
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    found = next(prefix for prefix in prefixes if prefix in ORDER)
    assert found != "mbc" or name == "mbc", f"{name} is in no room: give it one in ORDER"
    return ORDER.index(found)


def upward(found: Sequence[Import]) -> list[str]:
    return [f"{i.importer} -> {i.imported}" for i in found if room(i.imported) > room(i.importer)]


def test_every_file_has_a_place_and_every_place_a_file():
    assert {ORDER[room(name)] for name in modules()} == set(ORDER)


def test_imports_follow_the_order():
    assert upward([i for i in imports() if not i.lazy]) == []


def test_imports_inside_functions_follow_it_too():
    # What users call as `mbc.from_torch` is reached from the index of the whole, which is below everything.
    found = upward([i for i in imports() if i.lazy and (i.importer, i.imported) not in SHOWN])
    assert found == ["mbc -> mbc.pytorch.trainer"]


def test_imports_inside_functions_are_those_that_have_a_reason():
    lazy = {(i.importer, i.imported) for i in imports() if i.lazy}
    assert {pair for pair in lazy if not pair[0].startswith("mbc.cli")} == set(LAZY)


def test_no_file_imports_itself_by_way_of_others():
    edges: dict[str, list[str]] = {}
    for i in imports():
        if not i.lazy:
            edges.setdefault(i.importer, []).append(i.imported)
    assert circle(edges) == []


def test_a_circle_is_found():
    assert circle({"a": ["b", "d"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]
    assert circle({"a": ["b", "c"], "b": ["c"]}) == []


def test_an_import_is_found_wherever_it_stands():
    text = (
        "import m.a\nfrom m import b, VERSION\nif TYPE_CHECKING:\n  from m.c import C\ndef f():\n  from m.d import D\n"
        "import other"
    )
    found = list(imports_of("m.e", text, dict.fromkeys(["m", "m.a", "m.b", "m.c", "m.d"])))
    assert [(i.imported, i.lazy) for i in found] == [
        ("m.a", False), ("m.b", False), ("m", False), ("m.c", False), ("m.d", True)
    ]  # fmt: skip


def test_an_import_against_the_order_is_found():
    against = Import("mbc.optimize.selection.select", "mbc.optimize.schedule.liveness", False)
    along = Import("mbc.ir.transforms.expand", "mbc.ops.base", False)
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
