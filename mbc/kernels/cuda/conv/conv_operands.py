"""The operands of a convolution in any pass, and its sizes in the form that launchers read."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import axis_fields, in_plane
from mbc.kernels.launch_struct import Struct
from mbc.ops.convolution import Convolution

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


def sizes(request: Request) -> dict[str, int]:
    """Return the fields of `ConvolutionSizes` for a request in any pass, along its last two axes."""
    conv, (pad_top, pad_left) = ConvOperands.of(request), in_plane(attributes(request).before, 0)
    planes = {name: number for name, number in axes_of(request).items() if "depth" not in name}
    rows, channels, filters = (*conv.image.shape[:2], conv.features.shape[1])
    return {"rows": rows, "channels": channels, "filters": filters, **planes, "pad_top": pad_top, "pad_left": pad_left}


def axes_of(request: Request) -> dict[str, int]:
    """Return depth, height and width of image, output, filter and stride, such as `out_depth`."""
    a, conv = attributes(request), ConvOperands.of(request)
    return axis_fields(
        {"": conv.image.shape[2:], "out_": conv.features.shape[2:], "kernel_": a.kernel, "stride_": a.stride}
    )


def data_pass_sizes(request: Request) -> dict[str, int]:
    """Return the sizes of the convolution that computes the data gradient."""
    forward = sizes(request)
    return forward | {
        "channels": forward["filters"],
        "height": forward["out_height"],
        "width": forward["out_width"],
        "filters": forward["channels"],
        "out_height": forward["height"],
        "out_width": forward["width"],
        "pad_top": forward["kernel_height"] - 1 - forward["pad_top"],
        "pad_left": forward["kernel_width"] - 1 - forward["pad_left"],
    }


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
