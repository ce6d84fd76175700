"""The operands of a convolution in any pass, and its sizes in the form that launchers read."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import axis_fields, in_space
from mbc.kernels.launch_struct import Struct
from mbc.ops.convolution import Convolution

_PADDED = {"pad_front": "kernel_depth", "pad_top": "kernel_height", "pad_left": "kernel_width"}
_SIDES = (("channels", "filters"), ("depth", "out_depth"), ("height", "out_height"), ("width", "out_width"))
_OTHER_SIDE = dict((*_SIDES, *((out, read) for read, out in _SIDES)))
MOST_PIXELS = 1 << 15  # most pixels across or down, with padding: row and column share a word


@dataclass(frozen=True, slots=True)
class ConvOperands:
    """Types of the image, the features and the filter of one pass, or of their gradients."""

    image: TensorType
    features: TensorType
    weight: TensorType

    @staticmethod
    def of(request: Request) -> ConvOperands:
        """Return the operands of a request in any of the three passes."""
        (a, b), c = request.inputs, request.outputs[0]
        if request.kind == "convolution":
            return ConvOperands(a, c, b)
        return ConvOperands(c, a, b) if request.kind == "convolution_backward_data" else ConvOperands(a, b, c)


def attributes(request: Request) -> Convolution:
    """Return the attributes of a convolution."""
    a = request.attributes
    assert isinstance(a, Convolution)
    return a


@dataclass(frozen=True, slots=True)
class ConvolutionSizes(Struct):
    """The first fields of a convolution's arguments."""

    rows: int
    channels: int
    height: int
    width: int
    filters: int
    out_height: int
    out_width: int
    kernel_height: int
    kernel_width: int
    stride_height: int
    stride_width: int
    pad_top: int
    pad_left: int


@dataclass(frozen=True, slots=True)
class VolumeSizes(ConvolutionSizes):
    """The first fields of the arguments of a convolution along one to three axes.

    Attributes:
        depth: Planes of the image; 1 if the convolution has at most two axes.
        out_depth: Planes of the output; 1 if the convolution has at most two axes.
        kernel_depth: Planes of a window; 1 if the convolution has at most two axes.
        stride_depth: Planes from one window to the next; 1 if the convolution has at most two axes.
        pad_front: Planes of padding before the first plane; 0 if the convolution has at most two axes.
    """

    depth: int
    out_depth: int
    kernel_depth: int
    stride_depth: int
    pad_front: int


def volume_sizes(request: Request, backward: bool = False) -> dict[str, int]:
    """Return the fields of `VolumeSizes` for a request in any pass.

    Args:
        request: The forward pass of a convolution, or one of its gradients.
        backward: Whether the fields describe the convolution that computes the data gradient (for a stride of one).
    """
    conv, pads = ConvOperands.of(request), zip(_PADDED, in_space(attributes(request).before, 0), strict=True)
    rows, channels, filters = (*conv.image.shape[:2], conv.features.shape[1])
    forward = {"rows": rows, "channels": channels, "filters": filters, **axes_of(request), **dict(pads)}
    if not backward:
        return forward
    exchanged = {name: forward[_OTHER_SIDE.get(name, name)] for name in forward}
    return exchanged | {pad: forward[kernel] - 1 - forward[pad] for pad, kernel in _PADDED.items()}


def sizes(request: Request, backward: bool = False) -> dict[str, int]:
    """Return the fields of `ConvolutionSizes`: those of `volume_sizes` along the last two axes."""
    every = volume_sizes(request, backward)
    return {name: size for name, size in every.items() if "depth" not in name and name != "pad_front"}


def axes_of(request: Request) -> dict[str, int]:
    """Return depth, height and width of image, output, filter and stride, such as `out_depth`."""
    a, conv = attributes(request), ConvOperands.of(request)
    return axis_fields(
        {"": conv.image.shape[2:], "out_": conv.features.shape[2:], "kernel_": a.kernel, "stride_": a.stride}
    )


def data_pass_is_convolution(request: Request) -> bool:
    """Return whether the data gradient is a convolution, too.

    This needs a stride of one and less padding than the filter's size.
    """
    a = attributes(request)
    return set(a.stride) == {1} and all(before < k for before, k in zip(a.before, a.kernel, strict=True))


def channels_by(many: int, request: Request) -> bool:
    """Return whether both sides have a multiple of `many` channels, and sizes within the kernels' index arithmetic.

    The kernels have 32-bit indices, rows and columns of half a word, and neither dilation nor groups.
    """
    a, conv = attributes(request), ConvOperands.of(request)
    image, features = conv.image, conv.features
    return (
        image.shape[1] % many == 0
        and features.shape[1] % many == 0
        and max(*image.shape[2:], *features.shape[2:]) + max(a.pad) < MOST_PIXELS
        and max(image.elements, features.elements) < 1 << 31
        and a.groups == 1
        and set(a.dilation) == {1}
    )
