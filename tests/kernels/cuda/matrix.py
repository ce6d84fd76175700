"""Which cases of a matrix of kernels, shapes and precisions are tested always, and which in make test-all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from mbc.hardware.spec import find_spec
from mbc.ir.types import Precision
from mbc.kernels.cuda import OWN
from tests.kernels.cuda.cases import Case

EVERY = 5
MANY_IMAGES = 100  # a convolution of more takes the emulator many seconds


def is_long(case: Case) -> bool:
    return case.kind.startswith("convolution") and case.operands[0].shape[0] > MANY_IMAGES


def matrix(cases: Iterable[Case], precisions: Sequence[Precision]) -> list[object]:
    """Cases and precisions as parameters. All are exhaustive but the first of each kernel in each precision and every
    fifth of the others."""
    device = find_spec("h200")
    known: set[tuple[str, Precision]] = set()
    parameters: list[object] = []
    for number, case in enumerate(cases):
        for precision in (p for p in precisions if p in case.precisions):
            kernels = {(c.name, precision) for c in OWN.candidates(case.request(precision), device)}
            quick = not kernels <= known or (number % EVERY == 0 and not is_long(case))
            known |= kernels
            marks = () if quick else pytest.mark.exhaustive
            parameters.append(pytest.param(case, precision, marks=marks, id=f"{case.name}-{precision}"))
    return parameters
