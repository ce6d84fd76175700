"""A mutation campaign: its changes, the tests that it runs, and how it tells killed mutants from surviving ones."""

from __future__ import annotations

import ast
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import mutation
from mutation_operators import KINDS, Site, sites_of

ROOT = mutation.ROOT
SOURCE = """
from dataclasses import dataclass

@dataclass(slots=True)
class Box:
    sizes: tuple[int, 2] = (1, True)

def least(a, b, twice=False):
    assert a < 9
    if a <= b and not twice or a is None:
        return f"{a + 1}" + "x" * 2
    a += b % 4
    return min(a, b ** 2)
"""
KERNEL = """
// a < b && c
#define LEAST 4
template <int N = 2>
__global__ void kernel(const float* x, int n) {
  asm volatile("mov.u32 %0, 1 + 2;" : "=r"(n));
  for (int i = threadIdx.x; i < n && i >= 0; i += 32) x[i] = max(x[i], 1.5f) * "a < b";
}
"""


def mutants(source: str, name: str, folder: Path) -> set[str]:
    """Return the changed lines of all mutants of a source."""
    file = folder / name
    file.write_text(source, encoding="utf-8")
    changed = [mutation.difference(name, source.encode(), site) for site in sites_of(file)]
    return {line[1:].strip() for text in changed for line in text.splitlines() if line[0] == "+" and line[:3] != "+++"}


def test_sites_of_python_are_code_that_runs(tmp_path: Path) -> None:
    assert mutants(SOURCE, "small.py", tmp_path) == {
        "sizes: tuple[int, 2] = (2, True)", "sizes: tuple[int, 2] = (1, False)", "def least(a, b, twice=True):",
        "if a < b and not twice or a is None:", "if a <= b or not twice or a is None:",
        "if a <= b and  twice or a is None:", "if a <= b and not twice and a is None:",
        "if a <= b and not twice or a is not None:", 'return f"{a + 1}" + "x" * 3', "a += b // 4", "a += b % 5",
        "return max(a, b ** 2)", "return min(a, b ** 3)",
    }  # fmt: skip


def test_sites_of_kernels_are_outside_comments_templates_and_texts(tmp_path: Path) -> None:
    line = 'for (int i = threadIdx.x; i < n && i >= 0; i += 32) x[i] = max(x[i], 1.5f) * "a < b";'
    changes = (
        ("i < n", "i <= n"), ("&&", "||"), (">=", ">"), ("= 0", "= 1"), ("32", "33"), ("max", "min"), (") *", ") +"),
    )  # fmt: skip
    assert mutants(KERNEL, "small.cu", tmp_path) == {line.replace(*change) for change in changes}


def test_drawn_mutants_of_mbc_are_programs() -> None:
    generator = random.Random(0)
    files = generator.sample(sorted((ROOT / "mbc").rglob("*.py")), 12)
    kinds: set[str] = set()
    for file in files:
        source = file.read_bytes()
        for site in generator.sample(sites := sites_of(file), min(4, len(sites))):
            assert ast.dump(ast.parse(site.applied(source))) != ast.dump(ast.parse(source))
            ast.parse(site.probed(source, mutation.PROBE))
            kinds.add(site.kind)
    assert kinds <= set(KINDS) and len(kinds) > 2


def test_tests_of_a_module_run_first() -> None:
    own, importing, end_to_end = mutation.suites(ROOT, "mbc/ops/pooling.py")
    assert own == ["tests/ops/test_meaning.py"] and "tests/ops/test_gradients.py" in importing
    assert "tests/cli/test_compile.py" in end_to_end
    assert all(file.startswith(mutation.END_TO_END) for file in end_to_end)
    assert "tests/test_units.py" in mutation.suites(ROOT, "mbc/units.py")[0]
    assert "max_pool_batch_norm.cu" in mutation.including(ROOT, "templates/kernels/pool/pool.cuh")


@pytest.mark.parametrize(("change", "outcome"), [("<", "killed"), ("7", "survived"), ("never", "not reached")])
def test_the_judge_tells_killed_mutants_from_others(tmp_path: Path, change: str, outcome: str) -> None:
    source = "def grade(x):\n    if x == 'never':\n        return x < 'z'\n    return x < 4 if x < 9 else x > 7\n"
    (tmp_path / "all" / "mbc").mkdir(parents=True)
    (tmp_path / "all" / "tests").mkdir()
    (tmp_path / "all" / "mbc" / "__init__.py").touch()
    (tmp_path / "all" / "mbc" / "small.py").write_text(source)
    test = "from mbc.small import grade\ndef test_small():\n    assert grade(3) and not grade(4) and grade(9)\n"
    (tmp_path / "all" / "tests" / "test_small.py").write_text(test)
    copy = mutation.copied(tmp_path / "all", tmp_path / "copy")
    place = {"<": source.index("< 4"), "7": source.index("7"), "never": source.index("< 'z'")}[change]
    (site,) = (site for site in sites_of(copy.root / "mbc" / "small.py") if site.start == place)
    verdict = mutation.verdict(copy, "mbc/small.py", site)
    assert verdict.outcome == outcome and (outcome == "killed") is not bool(verdict.failure)
    assert (copy.root / "mbc" / "small.py").read_text() == source


def test_a_seed_draws_the_same_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = [(f"file{n}", Site("boolean", n, n + 1, "")) for n in range(50)]
    monkeypatch.setattr(mutation, "pools", lambda root: {(cuda, k): sites for cuda in (False, True) for k in KINDS})
    first, again, other = ([mutation.drawn(seed, n)[0] for n in range(30)] for seed in (1, 1, 2))
    assert first == again != other and len(set(first)) > 10
