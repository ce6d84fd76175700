"""The host code generated for real plans calls what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbc.compiler import compile_plan
from mbc.options import Options
from mbc.source import Source
from tests.codegen.fakes import PROGRAMS, as_planned, expected_log, run_against_fake

EXAMPLES = Path(__file__).parents[2] / "examples"


def _agrees(path: Path, folder: Path, options: Options) -> None:
    plan = compile_plan(Source(path.name, path.read_text(encoding="utf-8")), options)
    run = run_against_fake(plan, folder)
    for name in PROGRAMS:
        assert as_planned(run.eager[name]) == expected_log(plan, name)
        assert as_planned(run.captured[name]) == expected_log(plan, name)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micro_batch", [0, 24])
def test_digits(tmp_path: Path, precision: str, micro_batch: int) -> None:
    path = EXAMPLES / "01_digits" / "net.mbc"
    options = Options(gpu="h200", settings=(("train.precision", precision),), micro_batch=micro_batch)
    _agrees(path, tmp_path, options)
