"""Imports of commands: a command imports only what it needs, because most of its start-up is imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# OR-Tools' CP-SAT and linear solver import pandas, which takes longer than all of mbc.
SOLVERS = {"ortools.sat", "ortools.linear_solver", "pandas", "scipy"}
COMPILER = {"mbc.optimize", "mbc.kernels.providers", "mbc.codegen.render_sources", "lark", "jinja2", "ortools", "numpy"}
FRAMEWORKS = {"torch", "jax", "pycuda"}

PROGRAM = """
import sys
from mbc.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
assert code == 0, code
print(*sys.modules, file=sys.stderr)
"""


def imported(*words: str) -> set[str]:
    """Return the modules that a command has imported when it ends."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("words", ["--version", "--help", "show --help", "gpus", "gpus h200"])
def test_commands_without_planning_import_no_compiler(words: str):
    assert not imported(*words.split()) & (COMPILER | SOLVERS | FRAMEWORKS)


def test_a_plan_without_a_limit_takes_no_solver_but_the_maximum_flow():
    modules = imported("show", "examples/01_digits/net.mbc", "--gpu", "h200")
    assert "ortools.graph" in modules
    assert not modules & (SOLVERS | FRAMEWORKS)
