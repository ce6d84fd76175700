"""Run the kernels of some CUDA sources on the emulator, with the cases of `make test`; fail at the first wrong one.

    python benchmarks/mutation_kernels.py conv1x1.cu ...

Only these sources are compiled. Ends with 3 where one of them does not compile, and with 5 where none has a case.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from mutation import NO_CASE, NOT_COMPILED, WRONG

from mbc.kernels.base import DTYPE_CODES
from mbc.kernels.cuda import KERNELS
from tests.kernels.cuda import test_emulated
from tests.kernels.cuda.launching import Trial, check


def cases(function: Any, kernels: set[str]) -> list[tuple[Any, ...]]:
    """Return the parameters of a test that `make test` runs, of which one of the kernels is offered for the case."""
    (parametrize,) = (mark for mark in function.pytestmark if mark.name == "parametrize")
    pairs = [parameter.values for parameter in parametrize.args[1] if not parameter.marks]
    return [pair for pair in pairs if kernels & {c.name for c in test_emulated.offered(*pair)}]


def main(names: list[str]) -> int:
    """Return how the run ended."""
    kernels = {name for name, kernel in KERNELS.items() if Path(kernel.file).name in names}
    with tempfile.TemporaryDirectory() as folder:
        try:
            library = test_emulated.build(Path(folder), DTYPE_CODES["bf16"], names)
        except AssertionError as error:
            print(error)
            return NOT_COMPILED
        every = Trial.candidates
        Trial.candidates = lambda self: [c for c in every(self) if c.name in kernels]
        pairs = cases(test_emulated.test_kernel, kernels)
        products = cases(test_emulated.test_words_on_tensor_cores_are_as_exact_as_asked, kernels)
        try:
            for case, precision in pairs:
                check(library, case, precision)
            for case, precision in products:
                test_emulated.check_tensor_cores(library, case, precision)
        except AssertionError as error:
            print(str(error)[:500])
            return WRONG
    return 0 if pairs or products else NO_CASE


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
