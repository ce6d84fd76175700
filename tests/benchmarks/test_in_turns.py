"""Programs that benchmarks time in turns: the arithmetic of ratios, and processes with the code of a checkout."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import fusion_steps
from in_turns import Worker, in_turns

CHILD = """
import sys
sys.path.append({benchmarks!r})
import mbc
from in_turns import answer_requests
print("a line of a library")
answer_requests(lambda number: mbc.WHOSE if number else 1 / number)
"""


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.2])
def test_ratios_do_not_depend_on_slow_changes_of_the_clock_rate(factor: float) -> None:
    random = np.random.default_rng(0)
    calls: list[str] = []

    def timed(name: str, of: float) -> float:
        calls.append(name)
        drift = 1 + 0.01 * len(calls)  # the GPU becomes twice as slow
        return of * drift * (1 + 0.001 * random.standard_normal())

    result = in_turns(lambda: timed("first", 2.0), lambda: timed("second", 2.0 * factor), 50)
    assert result.ratio == pytest.approx(factor, rel=0.01) and 0 < result.spread < 0.05
    assert result.rounds == 50 and calls[:4] == ["first", "second", "second", "first"]
    assert calls.count("first") == calls.count("second") == 50


def test_a_worker_runs_the_code_of_its_checkout_and_survives_failures(tmp_path: Path) -> None:
    benchmarks = Path(fusion_steps.__file__).parent
    for name in ("one", "other"):
        (tmp_path / name / "mbc").mkdir(parents=True)
        (tmp_path / name / "mbc" / "__init__.py").write_text(f"WHOSE = {name!r}\n")
        with Worker([sys.executable, "-c", CHILD.format(benchmarks=str(benchmarks))], tmp_path / name) as worker:
            assert worker.ask(number=1) == name
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                worker.ask(number=0)
            assert worker.ask(number=2) == name


def test_a_worker_that_ends_or_is_late_says_why(tmp_path: Path) -> None:
    with (
        Worker([sys.executable, "-c", "raise SystemExit('no GPU here')"], tmp_path) as worker,
        pytest.raises(RuntimeError, match="exit code 1: no GPU here"),
    ):
        worker.ask(steps=1)
    with (
        Worker([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, limit_s=0.2) as worker,
        pytest.raises(RuntimeError, match="exit code -9"),
    ):
        worker.ask(steps=1)


def test_what_is_asked_of_all_networks_needs_both_kinds_of_them() -> None:
    examples = [{"ratio": 1.0, "imported": False}, {"ratio": 1.02, "imported": False}]
    imported = [{"ratio": ratio, "imported": True} for ratio in (0.9, 0.96, 0.99)]
    assert not fusion_steps.together(examples) and not fusion_steps.together(imported)
    figures = fusion_steps.together([*examples, *imported, {"failed": "no memory", "imported": True}])
    assert (figures["largest_ratio"], figures["imported_median"]) == (1.02, 0.96)
    assert figures["reached"] == {"largest_ratio": False, "imported_median": True}
