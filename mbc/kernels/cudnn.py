"""The provider `cudnn`: convolutions through cuDNN's graph API, alone and with batch statistics in the epilogue."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mbc.hardware.spec import DeviceSpec
from mbc.kernels.base import Acceptance, Arguments, Call, Candidate, Provider, Request
from mbc.kernels.cudnn_convolution import CUDNN_CONVOLUTION
from mbc.kernels.cudnn_statistics import CUDNN_STATISTICS
from mbc.kernels.statistics import WITH_STATISTICS


@dataclass(frozen=True)
class Cudnn:
    """The provider `cudnn`: one name in plans for convolutions with and without statistics.

    Launches of both kinds are rows of one structure (templates/host/convolution.cpp).
    """

    name: str = "cudnn"

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        """Return the candidates of a convolution, or of a convolution with batch statistics in the epilogue."""
        return _part(request).candidates(request, device)

    def accepts(self, call: Call, device: DeviceSpec) -> Acceptance:
        """Return whether cuDNN's graph API runs the call."""
        return _part(call.request).accepts(call, device)

    def arguments(self, call: Call, first_row: int) -> Arguments:
        """Return the integers of a `ConvolutionRow` and its knobs."""
        return _part(call.request).arguments(call, first_row)


def _part(request: Request) -> Provider:
    return CUDNN_STATISTICS if request.kind == WITH_STATISTICS else CUDNN_CONVOLUTION


CUDNN = Cudnn()
