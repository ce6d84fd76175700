"""The cases of a matrix of kernels, shapes and precisions that always run, and those that only make test-all runs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import pytest

from mbc.ir.types import Precision
from mbc.kernels.base import Candidate
from tests.effort import ALL_TESTS
from tests.kernels.cuda.cases import Case
from tests.kernels.cuda.launching import offered_anywhere

Pair = tuple[Case, Precision]
Offered = Callable[[Case, Precision], list[Candidate]]

PRECISIONS = (Precision.FP32, Precision.BF16)  # one library holds both; fp16 takes the same way through each kernel
CHOICE = Path(__file__).with_name("quick_cases.json")  # by tests/kernels/cuda/branches.py
MOST_ELEMENTS = 20_000  # of the operands of a case that `make test` runs if another one does not reach as much
MANY_IMAGES = 100  # of a convolution: more of them keep every block of a real GPU going round


def is_for_a_gpu(case: Case) -> bool:
    """Return whether a case takes minutes on the emulator, because the few blocks of its two multiprocessors repeat."""
    return case.kind.startswith("convolution") and case.operands[0].shape[0] > MANY_IMAGES


def elements(case: Case) -> int:
    """Return the number of the operands' elements, with which the emulator's time grows."""
    return sum(math.prod(operand.shape) for operand in case.operands)


def offered(case: Case, precision: Precision) -> list[Candidate]:
    return offered_anywhere(case.request(precision))


def kernels_of(case: Case, precision: Precision, offered: Offered = offered) -> set[tuple[str, Precision]]:
    """Return the kernels that are offered for a case."""
    return {(candidate.name, precision) for candidate in offered(case, precision)}


def id_of(case: Case, precision: Precision) -> str:
    return f"{case.name}-{precision}"


def is_small(case: Case) -> bool:
    return elements(case) <= MOST_ELEMENTS and not is_for_a_gpu(case)


def counts_of(pairs: Iterable[Pair]) -> Counter[str]:
    """Return how many small cases each kind of operation has."""
    return Counter(case.kind for case, _ in pairs if is_small(case))


def chosen(pairs: Sequence[Pair]) -> set[str]:
    """Return the ids of small cases that together reach what all small cases reach.

    If a kind of operation has more or fewer cases than when the choice was made, it is all of its small cases.
    """
    choice = json.loads(CHOICE.read_text(encoding="utf-8"))
    counts = counts_of(pairs)
    unchanged = {kind for kind, (count, *_) in choice.items() if count == counts[kind]}
    new = {id_of(case, precision) for case, precision in pairs if case.kind not in unchanged and is_small(case)}
    return new.union(*(choice[kind][1:] for kind in unchanged))


def matrix(pairs: Iterable[Pair], offered: Offered = offered, quick: Collection[str] = ()) -> list[object]:
    """Return the pairs for which kernels are offered, as parameters for the emulator, small ones first.

    All are exhaustive, except those of the ids `quick`, and the first of each kernel and precision that these lack.
    """
    kernels = {
        (case, precision): kernels_of(case, precision, offered) for case, precision in pairs if not is_for_a_gpu(case)
    }
    covered = {kernel for pair in kernels if id_of(*pair) in quick for kernel in kernels[pair]}
    parameters: list[object] = []
    for pair in sorted(filter(kernels.__getitem__, kernels), key=lambda pair: elements(pair[0])):
        is_quick = id_of(*pair) in quick or not kernels[pair] <= covered
        covered |= kernels[pair]
        if is_quick or ALL_TESTS:  # thousands of others would be collected to be left out
            parameters.append(pytest.param(*pair, marks=() if is_quick else pytest.mark.exhaustive, id=id_of(*pair)))
    return parameters
