"""The cases of a matrix of kernels, shapes and precisions that always run, and those that only make test-all runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest

from mbc.hardware.spec import find_spec
from mbc.ir.types import Precision
from mbc.kernels.base import Candidate
from mbc.kernels.cuda import OWN
from tests.effort import ALL_TESTS
from tests.kernels.cuda.cases import Case

EVERY = 10
FEW_ELEMENTS = 50_000  # of the operands of a small case
MANY_IMAGES = 100  # of a convolution: more of them keep every block of a real GPU going round


def is_for_a_gpu(case: Case) -> bool:
    """Return whether a case takes minutes on the emulator, because the few blocks of its two multiprocessors repeat."""
    return case.kind.startswith("convolution") and case.operands[0].shape[0] > MANY_IMAGES


def elements(case: Case) -> int:
    """Return the number of the operands' elements, with which the emulator's time grows."""
    return sum(math.prod(operand.shape) for operand in case.operands)


def offered(case: Case, precision: Precision) -> list[Candidate]:
    return list(OWN.candidates(case.request(precision), find_spec("h200")))


def matrix(
    pairs: Iterable[tuple[Case, Precision]], offered: Callable[[Case, Precision], list[Candidate]] = offered
) -> list[object]:
    """Return the pairs for which kernels are offered, as parameters for the emulator, small ones first.

    All are exhaustive, except the first of each kernel in each precision and every tenth of the other small ones.
    """
    covered: set[tuple[str, Precision]] = set()
    parameters: list[object] = []
    count = 0
    for case, precision in sorted(pairs, key=lambda pair: elements(pair[0])):
        kernels = {(candidate.name, precision) for candidate in offered(case, precision)}
        if not kernels or is_for_a_gpu(case):
            continue
        quick = not kernels <= covered or (count % EVERY == 0 and elements(case) <= FEW_ELEMENTS)
        covered |= kernels
        count += 1
        if quick or ALL_TESTS:  # thousands of others would be collected to be left out
            marks = () if quick else pytest.mark.exhaustive
            parameters.append(pytest.param(case, precision, marks=marks, id=f"{case.name}-{precision}"))
    return parameters
