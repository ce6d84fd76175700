"""Standardized filters, and the gradients of filters and gains."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mbc.kernels.cuda.base import OwnKernel, Slice, attributes_of
from mbc.kernels.cuda.norm.reduce import Lanes
from mbc.kernels.launch_struct import Struct

FILE = "norm/standardize.cu"


@dataclass(frozen=True, slots=True)
class StandardizeArguments(Struct):
    """Integer arguments of a launch of standardized filters, forward or backward.

    Attributes:
        elements: Elements of a filter.
        gained: Whether there is a gain for each filter.
    """

    filters: int
    elements: int
    lanes: int
    gained: int


def _arguments(at: Slice) -> StandardizeArguments:
    request = at.request
    filters, *sizes = request.inputs[0].shape
    elements = math.prod(sizes)
    without = 1 if request.kind == "standardize_filters" else 4
    lanes = Lanes.of([(filters, elements)], [(elements, 1)]).lanes
    return StandardizeArguments(filters, elements, lanes, int(len(request.inputs) > without))


KERNELS = tuple(
    OwnKernel(kind, FILE, StandardizeArguments, _arguments, attributes_of("eps", "factor"), operands=operands)
    for kind, operands in (
        ("standardize_filters", "w gain?gained y mean inverse"),
        ("standardize_filters_backward", "w dy mean inverse gain?gained dw dgain?gained"),
    )
)
