"""Run the kernels of some CUDA sources on the emulator, with the cases of `make test`; fail at the first wrong one.

    python benchmarks/mutation_kernels.py conv1x1.cu ...

Only these sources are compiled. Ends with 3 where one of them does not compile, and with 5 where none has a case.
"""

from __future__ import annotations

import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mutation import NO_CASE, NOT_COMPILED, WRONG

from mbc.kernels.base import DTYPE_CODES
from mbc.kernels.cuda import KERNELS
from tests.kernels.cuda import test_emulated
from tests.kernels.cuda.launching import Trial, check


@cache
def offered(*pair: Any) -> frozenset[str]:
    """Return the names of the kernels that are offered for a case in a precision."""
    return frozenset(candidate.name for candidate in test_emulated.offered(*pair))


def cases(function: Any, kernels: set[str]) -> list[tuple[Any, ...]]:
    """Return the parameters of a test that `make test` runs, of which one of the kernels is offered for the case."""
    (parametrize,) = (mark for mark in function.pytestmark if mark.name == "parametrize")
    pairs = [parameter.values for parameter in parametrize.args[1] if not parameter.marks]
    return [pair for pair in pairs if kernels & offered(*pair)]


def tried(name: str, folder: Path) -> int:
    """Compile one source and run its kernels; return how that ended."""
    kernels = {kernel.name for kernel in KERNELS.values() if Path(kernel.file).name == name}
    pairs = cases(test_emulated.test_kernel, kernels)
    products = cases(test_emulated.test_words_on_tensor_cores_are_as_exact_as_asked, kernels)
    folder.mkdir()
    try:
        library = test_emulated.build(folder, DTYPE_CODES["bf16"], [name])
    except AssertionError as error:
        print(error)
        return NOT_COMPILED
    every = Trial.candidates
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trial, "candidates", lambda self: [c for c in every(self) if c.name in kernels])
        try:
            for case, precision in pairs:
                check(library, case, precision)
            for case, precision in products:
                test_emulated.check_tensor_cores(library, case, precision)
        except AssertionError as error:
            print(str(error)[:500])
            return WRONG
    return 0 if pairs or products else NO_CASE


def main(names: list[str]) -> int:
    """Try the sources one by one, so that the first wrong kernel ends the run early; return how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        ended = {0}
        for name in names:
            ended.add(tried(name, Path(folder) / name))
            if ended & {WRONG, NOT_COMPILED}:
                return max(ended & {WRONG, NOT_COMPILED})
    return NO_CASE if ended == {0, NO_CASE} else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
