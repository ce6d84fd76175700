"""Requests, measurements and profiles to test with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mbc.hardware.spec import find_spec
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import Request
from mbc.ops.convolution import Convolution
from mbc.profile.model import Extent, Identity, Measurement, Profile
from mbc.profile.signature import signature

GPU = find_spec("h200")
IDENTITY = Identity(GPU.name, GPU.architecture, GPU.multiprocessors, "580.1", 91900, "2026-11-21", 1980, 3201)
FIRST, LAST = Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST


def request(rows: int = 8, kind: str = "convolution", channels: int = 4) -> Request:
    """Return a 3x3 convolution, or another pass of one."""
    image = TensorType((rows, channels, 8, 8), DType.FP32)
    weight = TensorType((channels, channels, 3, 3), DType.FP32)
    attributes = Convolution((8, 8), (3, 3), (1, 1), (1, 1, 1, 1))
    if kind == "convolution_backward_filter":
        return Request(kind, attributes, (image, image), (weight,), Precision.FP32)
    return Request(kind, attributes, (image, weight), (image,), Precision.FP32)


def measurement(engine: int, time_us: float, workspace_bytes: int = 0, layout: Layout = FIRST) -> Measurement:
    settings = (("engine", engine), ("knob2", 1))
    return Measurement(
        "cudnn", "convolution", settings, (layout,) * 3, workspace_bytes, time_us, 0.1, True, False, ("FFT",), 1e-7
    )


def profile(
    measured: Mapping[Request, Iterable[Measurement]],
    extents: Mapping[Request, Extent] | None = None,
    identity: Identity = IDENTITY,
    source: str = "p.sqlite",
) -> Profile:
    return Profile(
        identity,
        {signature(r): tuple(measurements) for r, measurements in measured.items()},
        source=source,
        extents={signature(r): extent for r, extent in (extents or {}).items()},
    )
