"""cuDNN's backend API as far as it works without a GPU, for an H200's properties; cuDNN 9 must be installed."""

from __future__ import annotations

import ctypes
import re
from unittest.mock import MagicMock

import pytest

from mbc.errors import MbcError
from mbc.hardware.cudnn_version import library_folders
from mbc.hardware.spec import find_spec
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cudnn import CUDNN
from mbc.kernels.cudnn_estimates import least_bytes
from mbc.kernels.cudnn_statistics import sums_bytes
from mbc.measure.cudnn_constants import Constant
from mbc.measure.cudnn_engines import refusal
from mbc.measure.cudnn_graph import ConvolutionGraph, Device
from mbc.measure.cudnn_library import CudnnRefusal, Library
from mbc.measure.cudnn_passes import strides
from mbc.ops.convolution import Convolution
from mbc.resources import data_text
from tests.kernels.statistics import with_statistics

FIRST, LAST = Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST
KINDS = ("convolution", "convolution_backward_data", "convolution_backward_filter")


def _installed() -> bool:
    try:
        Library.load()
    except MbcError:
        return False
    return True


needs_cudnn = pytest.mark.skipif(not _installed(), reason="cuDNN 9 is not installed")


@pytest.fixture(scope="module")
def device() -> Device:
    return Device.from_properties(Library.load(), data_text("h200_cudnn_device.json"))


def request(kind: str, precision: Precision, rows: int = 16, groups: int = 1, channels: int = 32) -> Request:
    working = precision.working
    image = TensorType((rows, channels, 14, 14), working)
    weight = TensorType((channels, channels // groups, 3, 3), working)
    attributes = Convolution((14, 14), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), groups)
    if kind == "convolution_backward_filter":
        return Request(kind, attributes, (image, image), (TensorType(weight.shape, precision.master),), precision)
    return Request(kind, attributes, (image, weight), (image,), precision)


def test_constants_are_those_of_the_header() -> None:
    headers = [folder.parent / "include" for folder in library_folders()]
    if not headers:
        pytest.skip("cuDNN's headers are not installed")
    text = "".join((headers[0] / f"cudnn_{part}_v9.h").read_text() for part in ("graph", "ops"))
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    definitions = re.findall(r"\bCUDNN_(\w+)(?:\s+CUDNN_DEPRECATED_ENUM)?\s*=\s*(-?\d+)\b", text)
    header = {name: int(value) for name, value in definitions}
    ours = {name: value for name, value in vars(Constant).items() if not name.startswith("_")}
    assert ours == {name: header.get(name) for name in ours}


def test_strides() -> None:
    assert strides((2, 3, 4, 5), FIRST) == [60, 20, 5, 1]
    assert strides((2, 3, 4, 5), LAST) == [60, 1, 15, 3]


def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object, **options: object) -> None:
        raise OSError("no such file")

    monkeypatch.setattr("mbc.hardware.cudnn_version.library_folders", lambda: iter(()))
    monkeypatch.setattr("ctypes.CDLL", missing)
    with pytest.raises(MbcError, match="cuDNN 9 was not found") as caught:
        Library.load()
    assert caught.value.code == "MBC078"


@needs_cudnn
def test_device_description_survives(device: Device) -> None:
    assert "NVIDIA H200" in device.description()


@needs_cudnn
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16])
def test_every_pass_has_an_engine_and_can_be_rebuilt(
    device: Device, precision: Precision, kind: str, layout: Layout
) -> None:
    graph = ConvolutionGraph(device, request(kind, precision), (layout,) * 3)
    configurations = list(graph.configurations())
    assert len({c.settings for c in configurations}) == len(configurations)
    admitted = [c for c in configurations if refusal(c, precision, deterministic=True) is None]
    assert admitted
    # The settings alone give the same plan, which is what a plan file relies on.
    best = admitted[0]
    rebuilt = graph.rebuild(best.settings)
    assert rebuilt == best
    assert graph.plan(rebuilt).workspace_bytes == graph.plan(best).workspace_bytes


@needs_cudnn
def test_strict_fp32_refuses_tensor_cores(device: Device) -> None:
    graph = ConvolutionGraph(device, request("convolution", Precision.FP32), (FIRST,) * 3)
    configurations = list(graph.configurations())
    refused = [c for c in configurations if refusal(c, Precision.FP32)]
    assert refused and all("TENSOR_CORE" in (refusal(c, Precision.FP32) or "") for c in refused)
    assert not any("TENSOR_CORE" in (refusal(c, Precision.TF32) or "") for c in refused)


@needs_cudnn
def test_a_nondeterministic_engine_is_refused_when_asked(device: Device) -> None:
    graph = ConvolutionGraph(device, request("convolution_backward_data", Precision.FP32), (FIRST,) * 3)
    loose = [c for c in graph.configurations() if not c.deterministic and not refusal(c, Precision.FP32)]
    assert loose
    assert "NONDETERMINISTIC" in (refusal(loose[0], Precision.FP32, deterministic=True) or "")


@needs_cudnn
def test_notes_can_be_admitted_by_name(device: Device) -> None:
    graph = ConvolutionGraph(device, request("convolution", Precision.FP32), (FIRST,) * 3)
    tensor_core = next(c for c in graph.configurations() if "TENSOR_CORE" in c.numerical)
    assert refusal(tensor_core, Precision.FP32, admitted=frozenset({"TENSOR_CORE"})) is None


@needs_cudnn
def test_double_precision_serves_as_reference(device: Device) -> None:
    for kind in KINDS:
        graph = ConvolutionGraph(device, request(kind, Precision.FP64, rows=4), (FIRST,) * 3)
        assert any(refusal(c, Precision.FP64, deterministic=True) is None for c in graph.configurations())


@needs_cudnn
def test_depthwise(device: Device) -> None:
    graph = ConvolutionGraph(device, request("convolution", Precision.FP32, groups=32), (FIRST,) * 3)
    assert any(refusal(c, Precision.FP32) is None for c in graph.configurations())


@needs_cudnn
def test_cudnns_refusals_are_quoted(device: Device) -> None:
    wrong = Request(
        "convolution",
        Convolution((14, 14), (3, 3)),
        (TensorType((16, 32, 14, 14), DType.FP32), TensorType((32, 32, 3, 3), DType.FP32)),
        (TensorType((16, 32, 99, 99), DType.FP32),),
        Precision.FP32,
    )
    with pytest.raises(CudnnRefusal, match="CUDNN_STATUS_") as caught:
        ConvolutionGraph(device, wrong, (FIRST,) * 3)
    assert caught.value.code == "MBC079" and caught.value.message.startswith("cuDNN refused cudnnBackend")


def test_the_answer_of_a_call_is_reported() -> None:
    def explain(detail: ctypes.Array[ctypes.c_char], _: int) -> None:
        detail.value = b"no driver\n"

    refusing = MagicMock()
    refusing.cudnnCreate.return_value = 1001
    refusing.cudnnGetErrorString.return_value = b"CUDNN_STATUS_NOT_INITIALIZED"
    refusing.cudnnGetLastErrorString.side_effect = explain
    with pytest.raises(CudnnRefusal) as caught:
        Library(refusing).create_handle()
    assert caught.value.code == "MBC079"
    assert caught.value.message == "cuDNN refused cudnnCreate: CUDNN_STATUS_NOT_INITIALIZED"
    assert caught.value.remedy == "no driver"


@needs_cudnn
@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (3, 1), (3, 2)])
def test_engines_that_leave_statistics_can_be_rebuilt(device: Device, kernel: int, stride: int) -> None:
    asked = with_statistics((64, 32, 28, 28), 64, kernel, stride=stride)
    graph = ConvolutionGraph(device, asked, (LAST,) * 3)
    admitted = [c for c in graph.configurations() if refusal(c, Precision.FP16, deterministic=True) is None]
    assert admitted
    for configuration in admitted:
        rebuilt = graph.rebuild(configuration.settings)
        assert rebuilt == configuration
        assert graph.plan(rebuilt).workspace_bytes == graph.plan(configuration).workspace_bytes


LAYERS = (  # channels, size, filters, kernel, stride
    (64, 56, 256, 1, 1), (64, 56, 64, 3, 1), (128, 56, 128, 3, 2), (256, 56, 512, 1, 2), (1024, 14, 256, 1, 1),
    (512, 7, 2048, 1, 1), (512, 7, 512, 3, 1), (8, 16, 8, 1, 1), (24, 9, 40, 3, 1), (32, 9, 16, 5, 1),
)  # fmt: skip


@needs_cudnn
@pytest.mark.parametrize("rows", [1, 2, 6, 32, 256])
def test_workspace_with_statistics_is_enough_for_an_engine(device: Device, rows: int) -> None:
    for channels, size, filters, kernel, stride in LAYERS:
        asked = with_statistics((rows, channels, size, size), filters, kernel, stride=stride)
        (candidate,) = CUDNN.candidates(asked, find_spec("h200"))
        graph = ConvolutionGraph(device, asked, (LAST,) * 3)
        needed = (graph.plan(c).workspace_bytes for c in graph.configurations() if not refusal(c, Precision.FP16, True))
        assert min(needed) + sums_bytes(asked.outputs[0]) <= candidate.workspace_bytes, asked


@needs_cudnn
def test_statistics_in_bf16_have_no_engine_that_a_package_could_run(device: Device) -> None:
    graph = ConvolutionGraph(device, with_statistics((64, 32, 28, 28), 64, 3, Precision.BF16), (LAST,) * 3)
    assert all(refusal(c, Precision.BF16) for c in graph.configurations())


@needs_cudnn
@pytest.mark.parametrize(
    ("precision", "layout"), [(Precision.FP32, FIRST), (Precision.FP32, LAST), (Precision.TF32, FIRST)]
)
def test_the_least_workspace_of_a_filter_gradient_has_room_for_more_than_the_direct_kernel(
    device: Device, precision: Precision, layout: Layout
) -> None:
    """A layer of Inception-v4: without any workspace cuDNN offers only engine 0, at a hundredth of the speed."""
    image, result = (TensorType((480, n, size, size), DType.FP32) for n, size in ((32, 149), (32, 147)))
    weight = TensorType((32, 32, 3, 3), DType.FP32)
    attributes = Convolution((149, 149), (3, 3), (1, 1), (0, 0, 0, 0))
    asked = Request("convolution_backward_filter", attributes, (image, result), (weight,), precision)
    graph = ConvolutionGraph(device, asked, (layout,) * 3)
    admitted = [c for c in graph.configurations() if refusal(c, precision, deterministic=True) is None]
    needs = [(c.engine, graph.plan(c).workspace_bytes) for c in admitted]
    assert next(engine for engine, size_bytes in needs if size_bytes == 0) == 0
    (bare,) = {c.workspace_bytes for c in CUDNN.candidates(asked, find_spec("h200")) if c.workspace_bytes < 4096}
    assert bare == least_bytes(weight, DType.FP32)
    assert next(engine for engine, size_bytes in needs if size_bytes <= bare) != 0
