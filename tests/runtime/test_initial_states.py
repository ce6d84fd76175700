"""Initial values of states."""

import math

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.ir.graph import Initializer
from mbc.ir.types import DType, TensorType
from mbc.runtime.initial_states import initial
from mbc.runtime.module import Module
from tests.runtime.nets import small_plan

WIDE = TensorType((200, 500), DType.FP32)


@pytest.mark.parametrize(
    ("initializer", "deviation", "bound"),
    [
        (Initializer("normal", 0.3), 0.3, math.inf),
        (Initializer("he", fan_in=50), math.sqrt(2 / 50), math.inf),
        (Initializer("xavier", fan_in=50, fan_out=30), math.sqrt(2 / 80), math.inf),
        (Initializer("uniform", 0.3), 0.3 / math.sqrt(3), 0.3),
        (Initializer("he_uniform", fan_in=50), math.sqrt(2 / 50), math.sqrt(6 / 50)),
        (Initializer("xavier_uniform", fan_in=50, fan_out=30), math.sqrt(2 / 80), math.sqrt(6 / 80)),
    ],
)
def test_distributions(initializer: Initializer, deviation: float, bound: float):
    array = initial("w", WIDE, initializer, 0)
    assert array.dtype == np.float32 and array.shape == WIDE.shape
    assert array.std() == pytest.approx(deviation, rel=0.02)
    assert abs(array.mean()) < 0.02 * deviation
    assert abs(array).max() <= bound


def test_a_constant():
    assert (initial("w", WIDE, Initializer("constant", 0.25), 0) == 0.25).all()


def test_values_depend_on_seed_and_name_only():
    he = Initializer("he", fan_in=9)
    assert (initial("a", WIDE, he, 1) == initial("a", WIDE, he, 1)).all()
    assert (initial("a", WIDE, he, 1) != initial("b", WIDE, he, 1)).any()
    assert (initial("a", WIDE, he, 1) != initial("a", WIDE, he, 2)).any()
    double = TensorType(WIDE.shape, DType.FP64)
    np.testing.assert_array_equal(initial("a", double, he, 1).astype(np.float32), initial("a", WIDE, he, 1))


def test_plans_of_a_network_start_alike():
    first = Module(small_plan(), seed=5, device="cpu")
    second = Module(small_plan("bf16", 2), seed=5, device="cpu")
    for name in first.states:
        np.testing.assert_array_equal(first.state(name), second.state(name))


def test_unknown_initialisers_are_named():
    with pytest.raises(MbcError, match="state 'w' has the initializer 'magic'") as caught:
        initial("w", WIDE, Initializer("magic"), 0)
    assert caught.value.code == "MBC140"
