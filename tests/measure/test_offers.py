"""Offers, from cuDNN's own lists for an H200 that is not here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mbc.errors import MbcError
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import Candidate, Request
from mbc.kernels.cudnn import CUDNN
from mbc.kernels.cudnn_convolution import CUDNN_CONVOLUTION, ConvolutionRow
from mbc.kernels.cudnn_statistics import LAYOUTS, sums_bytes
from mbc.measure import offers as offering
from mbc.measure.cudnn_engines import Configuration
from mbc.measure.cudnn_graph import Device
from mbc.measure.cudnn_library import Library
from mbc.measure.offers import BEST_PER_LAYOUT, Offered, device_spec, engine_offer, offers
from mbc.ops.base import NoAttributes
from mbc.resources import data_text
from tests.kernels.statistics import with_statistics
from tests.measure.test_harness import PASSES, product

LIMIT = 1 << 33


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    try:
        library = Library.load()
    except MbcError as error:
        pytest.skip(error.message)
    device = Device.from_properties(library, data_text("h200_cudnn_device.json"))
    asked = Candidate(
        "cudnn_legacy", "convolution", (("algorithm", 4),), (Layout.CHANNELS_FIRST,) * 3, 1 << 20, 0.0, False
    )

    def legacy(library: Library, handle: int, request: Request) -> Any:
        return iter([(asked, ("FFT",))]) if request.kind == "convolution" else iter(())

    monkeypatch.setattr(offering, "legacy_candidates", legacy)
    return SimpleNamespace(device=device, library=library, name="NVIDIA H200", architecture="sm_90")


def convolution(kind: str, precision: Precision, rows: int = 64) -> Request:
    return product(kind, precision, rows)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16])
@pytest.mark.parametrize("kind", PASSES)
def test_engines_are_offered_as_the_provider_runs_them(gpu: Any, kind: str, precision: Precision) -> None:
    request = convolution(kind, precision)
    offered = offers(gpu, request, LIMIT)
    engines = [o for o in offered.offers if o.candidate.provider == "cudnn"]
    assert {o.candidate.layouts for o in engines} == {(layout,) * 3 for layout in Layout}
    for layout in Layout:
        assert 1 <= sum(o.candidate.layouts[0] is layout for o in engines) <= 2 * BEST_PER_LAYOUT
    for offer in engines:
        c = offer.candidate
        a = CUDNN_CONVOLUTION.arguments(c.call(request), 0)
        row = dict(zip(ConvolutionRow.names(), a.integers, strict=False))
        given = dict(c.settings)
        assert row["engine"] == given["engine"] >= 0
        assert row["layout"] == (c.layouts[0] is Layout.CHANNELS_LAST)
        assert row["deterministic"] == c.deterministic == ("NONDETERMINISTIC" not in offer.notes)
        knobs = a.integers[len(ConvolutionRow.names()) :]
        assert list(knobs) == [n for k, v in c.settings if k.startswith("knob") for n in (int(k[4:]), v)]
        assert "RUNTIME_COMPILATION" not in offer.notes
        assert c.accumulates == (kind == "convolution_backward_filter")
        # The least that holds a filter gradient of 16-bit operands: 16 * 8 * 3 * 3 elements of 2 bytes.
        staged = kind == "convolution_backward_filter" and precision.working is not DType.FP32
        assert c.workspace_bytes >= (2304 if staged else 0)
    assert [o.candidate.provider for o in offered.spare].count("mbc") == len(offered.spare) > 0
    if precision is Precision.FP32:
        assert any("TENSOR_CORE are not admitted" in note for note in offered.left_out)


def test_engines_that_leave_statistics_are_offered(gpu: Any) -> None:
    request = with_statistics((64, 32, 28, 28), 64, 3)
    offered = offers(gpu, request, LIMIT)
    assert offered.offers and offered.spare == ()
    for offer in offered.offers:
        c = offer.candidate
        assert (c.provider, c.name, c.accumulates) == ("cudnn", request.kind, False)
        assert c.layouts == LAYOUTS  # no other has any
        row = CUDNN.arguments(c.call(request), 0).integers
        given = dict(zip(ConvolutionRow.names(), row, strict=False))
        assert given["statistics"] == 1 and given["engine"] == dict(c.settings)["engine"] >= 0
        assert c.workspace_bytes > sums_bytes(request.outputs[0])
    none = offers(gpu, with_statistics((64, 32, 28, 28), 64, 3, Precision.BF16), LIMIT)
    assert none.offers == none.spare == ()


def test_other_libraries_are_asked(gpu: Any) -> None:
    offered = offers(gpu, convolution("convolution", Precision.FP32), LIMIT)
    legacy = [o for o in offered.offers if o.candidate.provider == "cudnn_legacy"]
    assert [o.notes for o in legacy] == [("FFT",)]
    linear = offers(gpu, product("linear", Precision.BF16), LIMIT)
    assert {o.candidate.provider for o in linear.offers} == {"cublaslt"}
    assert {o.candidate.provider for o in linear.spare} == {"mbc"}
    x = TensorType((4, 8), DType.FP32)
    own = offers(gpu, Request("relu", NoAttributes(), (x,), (x,), Precision.FP32), LIMIT)
    assert {o.candidate.provider for o in own.offers} == {"mbc"} and own.spare == ()


def test_the_limit_is_kept_and_said(gpu: Any) -> None:
    request = convolution("convolution", Precision.FP32)
    offered: Offered = offers(gpu, request, (1 << 20) - 1)
    assert all(o.candidate.workspace_bytes < 1 << 20 for o in (*offered.offers, *offered.spare))
    assert any(note.endswith("need more than 1024.0 KiB of workspace") for note in offered.left_out)


class Listed:
    """A graph whose engines need these workspaces, best engine first."""

    def __init__(self, *workspaces: int) -> None:
        self._workspaces = workspaces

    def configurations(self) -> Any:
        for number, _ in enumerate(self._workspaces):
            yield Configuration(number, (), frozenset(), frozenset(), SimpleNamespace())  # pyright: ignore[reportArgumentType]

    def plan(self, configuration: Configuration) -> Any:
        return SimpleNamespace(workspace_bytes=self._workspaces[configuration.engine])


def listed(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, *workspaces: int, limit: int = LIMIT
) -> tuple[list[int], Offered]:
    monkeypatch.setattr(offering, "ConvolutionGraph", lambda device, request, layouts: Listed(*workspaces))
    offered = offers(gpu, convolution("convolution_backward_data", Precision.FP32), limit)
    first = [o for o in offered.offers if o.candidate.layouts[0] is Layout.CHANNELS_FIRST]
    return [dict(o.candidate.settings)["engine"] for o in first], offered


def test_after_the_best_only_candidates_that_need_less(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, offered = listed(gpu, monkeypatch, *(9,) * 8, 10, 9, 8, 8, 3, 0, 0, 5)
    assert tried == [*range(8), 10, 12, 13]
    assert "nchw engines after the best 11" in offered.left_out
    tried, _ = listed(gpu, monkeypatch, *(0, 9) * 8)
    assert tried == list(range(8))


def test_under_a_limit_the_best_that_keep_to_it(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, _ = listed(gpu, monkeypatch, *(99,) * 8, *(9,) * 10, 0, limit=50)
    assert tried == [*range(8, 16), 18]


def test_engine_offer_carries_its_notes() -> None:
    configuration = Configuration(3, ((2, 5),), frozenset({"FFT"}), frozenset(), SimpleNamespace())  # pyright: ignore[reportArgumentType]
    offer = engine_offer(product("convolution"), Layout.CHANNELS_LAST, configuration, 512)
    assert offer.notes == ("FFT",)
    assert offer.candidate.settings == (("deterministic", 1), ("engine", 3), ("knob2", 5), ("layout", 1))


def test_a_gpu_that_is_not_in_the_list() -> None:
    gpu: Any = SimpleNamespace(name="NVIDIA H100 NVL", architecture="sm_90")
    spec = device_spec(gpu)
    assert (spec.name, spec.architecture, spec.measured) == ("NVIDIA H100 NVL", "sm_90", False)
