"""Errors of a kernel's results whose values are so small that the storage type rounds them more coarsely."""

from __future__ import annotations

import numpy as np

from mbc.ir.types import DType
from tests.kernels.cuda.launching import SMALLEST_NORMAL, TOLERANCES, relative_error


def test_fp16_may_round_numbers_below_its_normal_ones_more_coarsely():
    smallest, tolerance = SMALLEST_NORMAL[DType.FP16], TOLERANCES[DType.FP16]
    wanted = np.geomspace(smallest / 1000, smallest, 100)
    rounded = wanted.astype(np.float16).astype(np.float64)
    assert relative_error(rounded, wanted, smallest) <= tolerance < relative_error(rounded, wanted)
    assert relative_error(rounded * 1.01, wanted, smallest) > tolerance
