"""The tuning constants of the search are in one file, explained, and in use."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from mbc.optimize import effort

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZE = ROOT / "mbc" / "optimize"
SOURCE = Path(effort.__file__).read_text()

# Numbers of other files that tune nothing.
ELSEWHERE = {
    "bounds/measured_floor.py": {"BANDWIDTH_SHARE"},  # what a good kernel reaches
    "candidates/pareto.py": {"_ROUNDING", "_FEW_ROWS"},  # rounding, and what NumPy costs
    "candidates/table.py": {"MICRO_BATCH_ALIGNMENT_BYTES"},  # what candidates were measured with
    "placement/block_file.py": {"_MOST"},  # of an integer in a file
    "schedule/contention.py": {"COMPUTING", "FILLING", "WAIT_US", "COPY_WAIT_US"},  # a model, fitted to measured steps
    "schedule/simulate.py": {"_IDLE_US"},  # rounding
    "search/overhead.py": {  # a model of what CUDA takes
        "UNMEASURED_BYTES", "USUAL_LAUNCHES", "LAUNCH_BYTES", "USUAL_HOST_BYTES", "HOST_BYTES_MAPPED"
    },
    "selection/layout_mincut.py": {"_UNITS_PER_US", "_NEVER", "_LAST_END", "_FIRST_END"},  # whole numbers for a solver
    "selection/workspace_division.py": {"_UNITS_PER_US"},  # whole numbers for a solver
}  # fmt: skip


def numbers(text: str) -> Iterator[tuple[str, int]]:
    """Return names and lines of those constants of a file that are numbers or tuples of numbers."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            parts = list(ast.walk(node.value))
            if any(isinstance(p, ast.Constant) and isinstance(p.value, int | float) for p in parts) and all(
                isinstance(p, ast.Constant | ast.Tuple | ast.BinOp | ast.operator | ast.expr_context) for p in parts
            ):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
                yield from ((name, node.lineno) for name in names)


def test_numbers_of_the_search_are_nowhere_else():
    elsewhere = {
        path.relative_to(OPTIMIZE).as_posix(): {name for name, _ in numbers(path.read_text())}
        for path in OPTIMIZE.rglob("*.py")
        if path != Path(effort.__file__)
    }
    assert {file: names for file, names in elsewhere.items() if names} == ELSEWHERE


def test_every_constant_is_explained():
    lines = SOURCE.splitlines()
    constants = {line for _, line in numbers(SOURCE)}
    assert len(constants) > 70
    for line in sorted(constants):
        above = line - 1
        while above in constants:
            above -= 1
        assert re.match(r"# [^-]", lines[above - 1]), f"line {line} has no comment"


def test_every_constant_is_used():
    code = "".join(path.read_text() for path in OPTIMIZE.rglob("*.py"))
    assert [name for name, _ in numbers(SOURCE) if not re.search(rf"\beffort\.{name}\b", code)] == []


def test_decisions_that_are_named_exist():
    comments = [line for line in SOURCE.splitlines() if line.startswith("#")]
    named = {number for line in comments for number in re.findall(r"\b0\d\d\b", line)}
    decisions = {path.name[:3] for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md")}
    assert len(named) > 10 and named <= decisions
