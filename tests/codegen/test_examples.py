"""The host code of a divided plan makes the calls of the plan. `tests/examples` tests undivided plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbc.compiler import compile_plan
from mbc.options import Options
from mbc.source import Source
from tests.codegen.fakes import assert_as_planned, run_against_fake

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_divided_digits(tmp_path: Path, precision: str) -> None:
    path = EXAMPLES / "01_digits" / "net.mbc"
    options = Options(gpu="h200", settings=(("train.precision", precision),), micro_batch=24)
    plan = compile_plan(Source(path.name, path.read_text(encoding="utf-8")), options)
    run = run_against_fake(plan, tmp_path)
    assert_as_planned(run, plan)
