"""Requests of convolutions with statistics in the epilogue, of the batch or of each sample, for any provider."""

from __future__ import annotations

from mbc.ir.types import TensorType
from mbc.kernels.base import Request
from mbc.ops.fused import Fused

WITH_STATISTICS = "convolution+batch_statistics"
WITH_INSTANCE_STATISTICS = "convolution+instance_statistics"
STATISTICS_GROUPS = (WITH_STATISTICS, WITH_INSTANCE_STATISTICS)


def convolution_of(request: Request) -> Request:
    """Return the convolution of such a group; any other request is returned unchanged."""
    if request.kind not in STATISTICS_GROUPS:
        return request
    return _member(request, 0, request.inputs, request.outputs[:1])


def statistics_of(request: Request) -> Request:
    """Return the statistics of such a group."""
    return _member(request, 1, request.outputs[:1], request.outputs[1:])


def _member(request: Request, number: int, inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Request:
    assert isinstance(request.attributes, Fused)
    member = request.attributes.members[number]
    return Request(member.kind, member.attributes, inputs, outputs, request.precision)
