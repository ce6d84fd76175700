"""The enumeration of legacy algorithms.

The tests use the fake library that generated host code is tested with, because cuDNN itself answers only on a GPU.
The numbers are compared with the installed headers.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mbc.hardware.cudnn_version import library_folders
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import LAYOUT_CODES, Candidate, Request
from mbc.kernels.cudnn_legacy import ALGORITHMS, MATHS
from mbc.measure.cudnn_library import Library
from mbc.measure.legacy_algorithms import legacy_candidates
from mbc.ops.convolution import Convolution
from mbc.ops.matrix import Linear
from tests.codegen.fakes import compile_fakes
from tests.kernels.test_cudnn_legacy import OPERANDS

FIRST, LAST = Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST
KINDS = tuple(OPERANDS)


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Library, int, ctypes.CDLL]]:
    loaded = ctypes.CDLL(str(compile_fakes(tmp_path_factory.mktemp("fake"))))
    library = Library(loaded)
    handle = library.create_handle()
    yield library, handle, loaded
    library.destroy_handle(handle)
    assert loaded.fake_cudnn_handles() == 0


def request(
    kind: str, precision: Precision = Precision.FP32, stride: int = 1, pad: tuple[int, int, int, int] = (2, 2, 1, 1)
) -> Request:
    """A grouped and dilated convolution of 6 rows with nothing square."""
    attributes = Convolution((9, 8), (3, 2), (stride, stride), pad, (2, 1), 2)
    height, width = attributes.output_size
    shapes = {"image": (6, 4, 9, 8), "filter": (10, 2, 3, 2), "result": (6, 10, height, width)}
    types = [TensorType(shapes[name], precision.working) for name in OPERANDS[kind]]
    if kind == "convolution_backward_filter":
        types[2] = TensorType(types[2].shape, precision.master)
    return Request(kind, attributes, tuple(types[:2]), (types[2],), precision)


def offered(fake: tuple[Library, int, ctypes.CDLL], asked: Request) -> list[tuple[int, Layout, int, int]]:
    """Return (algorithm, layout, math, workspace) of every candidate, and assert that all descriptors are freed."""
    library, handle, loaded = fake
    candidates = [candidate for candidate, _ in legacy_candidates(library, handle, asked)]
    assert loaded.fake_cudnn_descriptors() == 0
    return [_told(candidate) for candidate in candidates]


def _told(candidate: Candidate) -> tuple[int, Layout, int, int]:
    assert (candidate.provider, candidate.time_us, candidate.measured) == ("cudnn_legacy", 0.0, False)
    settings = dict(candidate.settings)
    assert candidate.layouts == ((FIRST, LAST)[settings["layout"]],) * 3
    return settings["algorithm"], candidate.layouts[0], settings["math"], candidate.workspace_bytes


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // 256) * 256


@pytest.mark.parametrize("kind", KINDS)
def test_every_algorithm_is_asked_for_in_both_layouts(fake: tuple[Library, int, ctypes.CDLL], kind: str) -> None:
    """The fake checks sizes, strides and types.

    It supports all algorithms but number 3, in channels last numbers 0 to 2.
    """
    fma = MATHS["FMA"]
    numbers = [n for n in range(len(ALGORITHMS[kind])) if n != 3]
    expected = [(n, FIRST, fma, _aligned(600 * n)) for n in numbers]
    expected += [(n, LAST, fma, _aligned(600 * n)) for n in numbers if n < 3]
    assert offered(fake, request(kind)) == expected


def test_unsupported_algorithms_are_left_out(fake: tuple[Library, int, ctypes.CDLL]) -> None:
    assert [n for n, layout, _, _ in offered(fake, request("convolution", stride=2)) if layout is FIRST] == [0, 1, 2]


def test_tf32_offers_both_kinds_of_math_where_they_differ(fake: tuple[Library, int, ctypes.CDLL]) -> None:
    all_candidates = offered(fake, request("convolution", Precision.TF32))
    maths = [math for n, layout, math, _ in all_candidates if (n, layout) == (1, FIRST)]
    assert maths == [MATHS["DEFAULT"], MATHS["FMA"]]
    assert [math for n, layout, math, _ in all_candidates if (n, layout) == (0, FIRST)] == [MATHS["DEFAULT"]]


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_half_precision_uses_tensor_cores_and_reserves_room_to_widen(
    fake: tuple[Library, int, ctypes.CDLL], precision: Precision
) -> None:
    forward = offered(fake, request("convolution", precision))
    assert {math for _, _, math, _ in forward} == {MATHS["TENSOR_OP"]}  # the default needs the same in the fake
    filters = offered(fake, request("convolution_backward_filter", precision))
    assert filters[:2] == [(0, FIRST, 1, 256), (1, FIRST, 1, 256 + 768)]  # 120 elements, then 601 bytes


def test_other_requests_have_none(fake: tuple[Library, int, ctypes.CDLL]) -> None:
    linear = Request("linear", Linear((4,)), (TensorType((2, 4), DType.FP32),) * 2, (), Precision.FP32)
    assert offered(fake, linear) == []
    assert offered(fake, request("convolution", Precision.FP64)) == []
    assert offered(fake, request("convolution", pad=(2, 1, 1, 1))) == []
    wide = TensorType((1, 2, 1 << 16, 1 << 15), DType.FP32)  # its strides are no ints
    pointwise = Convolution((1 << 16, 1 << 15), (1, 1))
    weight = TensorType((2, 2, 1, 1), DType.FP32)
    assert offered(fake, Request("convolution", pointwise, (wide, weight), (wide,), Precision.FP32)) == []


def test_where_layouts_are_alike_one_is_enough(fake: tuple[Library, int, ctypes.CDLL]) -> None:
    pixel, weight = TensorType((6, 4, 1, 1), DType.FP32), TensorType((4, 4, 1, 1), DType.FP32)
    asked = Request("convolution", Convolution((1, 1), (1, 1)), (pixel, weight), (pixel,), Precision.FP32)
    assert {layout for _, layout, _, _ in offered(fake, asked)} == {FIRST}


def test_numbers_are_those_of_the_header() -> None:
    headers: list[Path] = [folder.parent / "include" for folder in library_folders()]
    if not headers:
        pytest.skip("cuDNN's headers are not installed")
    text = "".join((headers[0] / f"cudnn_{part}_v9.h").read_text() for part in ("graph", "ops"))
    numbers = {name: int(value) for name, value in re.findall(r"\bCUDNN_(\w+)\s*=\s*(\d+)\b", text)}
    prefixes = {"convolution": "FWD_ALGO_", "convolution_backward_data": "BWD_DATA_ALGO_"}
    for kind, algorithms in ALGORITHMS.items():
        prefix = "CONVOLUTION_" + prefixes.get(kind, "BWD_FILTER_ALGO_")
        ours = {prefix + name.removeprefix("ALGO_"): number for number, name in enumerate(algorithms)}
        assert ours == {name: numbers[name] for name in ours}
        assert numbers[prefix + "COUNT"] == len(algorithms)
    assert {name: numbers[f"{name}_MATH"] for name in MATHS} == MATHS
    formats = {Layout.CHANNELS_FIRST: numbers["TENSOR_NCHW"], Layout.CHANNELS_LAST: numbers["TENSOR_NHWC"]}
    assert formats == LAYOUT_CODES
