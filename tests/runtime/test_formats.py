"""Rounding and the order of elements."""

import numpy as np
import pytest

from mbc.ir.types import DType, Layout
from mbc.ops.rounding import from_bf16, to_bf16
from mbc.runtime.formats import canonical_view, loaded, stored_bytes


def test_bfloat16_rounds_to_nearest_even():
    ulp = 2.0**-7  # of bfloat16 at 1
    values = np.array([1, 1 + ulp / 2, 1 + ulp * 1.5, 1 + ulp * 0.51, -1 - ulp / 2], np.float32)
    assert from_bf16(to_bf16(values)).tolist() == [1, 1, 1 + 2 * ulp, 1 + ulp, -1]


def test_bfloat16_keeps_infinities_and_nan():
    bits = np.array([0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF], np.uint32)
    nan, quiet, negative, largest = from_bf16(to_bf16(bits.view(np.float32)))
    assert np.isnan([nan, quiet, negative]).all()
    assert np.isposinf(largest)  # the largest float32 is nearer to 2^128 than to the largest bfloat16
    assert from_bf16(to_bf16(np.array([np.inf, -np.inf, -0.0], np.float32))).tolist() == [np.inf, -np.inf, 0.0]


def test_bfloat16_is_pytorchs():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    values = np.random.default_rng(0).integers(0, 1 << 32, 100_000, np.uint32).view(np.float32)
    values = values[~np.isnan(values)]
    theirs = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(from_bf16(to_bf16(values)), theirs)


@pytest.mark.parametrize("dtype", [DType.FP64, DType.FP32, DType.BF16, DType.FP16, DType.INT32, DType.UINT8])
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("shape", [(3,), (4, 5), (2, 3, 4, 5), (2, 3, 4, 5, 2)])
def test_stored_bytes_load_again(dtype: DType, layout: Layout, shape: tuple[int, ...]):
    array = np.random.default_rng(1).integers(0, 100, shape)
    data = stored_bytes(array, dtype, layout)
    assert data.nbytes == array.size * dtype.size_bytes
    np.testing.assert_array_equal(loaded(data, shape, dtype, layout), array)


def test_channels_last_moves_axis_1_to_the_end():
    array = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    data = stored_bytes(array, DType.FP32, Layout.CHANNELS_LAST)
    np.testing.assert_array_equal(data.view(np.float32).reshape(2, 4, 5, 3), array.transpose(0, 2, 3, 1))


def test_a_canonical_view_shares_its_bytes():
    data = np.zeros(2 * 3 * 4 * 4, np.uint8)
    canonical_view(data, (2, 3, 4), DType.FP32, Layout.CHANNELS_LAST)[1, 2, 3] = 7
    assert data.view(np.float32)[-1] == 7


def test_fp16_overflows_to_infinity_without_a_warning(recwarn: pytest.WarningsRecorder):
    data = stored_bytes(np.array([1e6], np.float32), DType.FP16, Layout.CHANNELS_FIRST)
    assert np.isinf(loaded(data, (1,), DType.FP16, Layout.CHANNELS_FIRST)).all()
    assert not recwarn.list
