"""DeepBench's training convolutions with 3 x 3 and 5 x 5 kernels that it lists at mini-batch 256, and AlexNet's.

Shapes are those of https://github.com/baidu-research/DeepBench (convolution, training, N = 256), each once; AlexNet's
are of Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from record import ROOT  # puts mbc on the path

from mbc.ir.types import Precision, TensorType
from mbc.kernels.base import Request
from mbc.ops import KINDS
from mbc.ops.convolution import Convolution

assert ROOT
BATCH = 256
PASSES = {"F": "convolution", "D": "convolution_backward_data", "W": "convolution_backward_filter"}
FIRST_LAYER_CHANNELS = 3  # nobody needs the gradient of an image
SLICE_ALIGNMENT_BYTES = 16  # of every operand of a slice


@dataclass(frozen=True)
class Layer:
    """One convolution: images of `height` x `width` pixels, square kernel, the same padding on all sides."""

    suite: str  # deepbench | alexnet
    name: str
    width: int
    height: int
    channels: int
    outputs: int
    kernel: int
    pad: int
    stride: int

    @property
    def attributes(self) -> Convolution:
        pad, k, s = self.pad, self.kernel, self.stride
        return Convolution((self.height, self.width), (k, k), (s, s), (pad, pad, pad, pad))

    @property
    def flops(self) -> float:
        """Of one pass over the mini-batch."""
        high, wide = self.attributes.output_size
        return 2.0 * BATCH * high * wide * self.outputs * self.channels * self.kernel**2


@dataclass(frozen=True)
class Operation:
    """One pass of a layer in one precision."""

    layer: Layer
    which: str  # F | D | W
    precision: Precision

    @property
    def name(self) -> str:
        return f"{self.layer.name} {self.which}"

    @property
    def sums(self) -> bool:
        """Whether the results of slices are added up."""
        return KINDS[PASSES[self.which]].accumulates

    @property
    def per_sample(self) -> tuple[bool, bool, bool]:
        """Which operands (two inputs, then the output) have the rows of the mini-batch."""
        return (True, True, False) if self.sums else (True, False, True)

    def request(self, rows: int = BATCH) -> Request:
        attributes, working = self.layer.attributes, self.precision.working
        high, wide = attributes.output_size
        image = TensorType((rows, self.layer.channels, self.layer.height, self.layer.width), working)
        feature = TensorType((rows, self.layer.outputs, high, wide), working)
        weight = TensorType((self.layer.outputs, self.layer.channels, self.layer.kernel, self.layer.kernel), working)
        inputs = {"F": (image, weight), "D": (feature, weight), "W": (image, feature)}[self.which]
        output = {"F": feature, "D": image, "W": replace(weight, dtype=self.precision.master)}[self.which]
        return Request(PASSES[self.which], attributes, inputs, (output,), self.precision)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows that a call may work on, largest first: powers of two whose slices start aligned."""
        request = self.request(1)
        rows = [t.size_bytes for t in (*request.inputs, *request.outputs) if t.shape[0] == 1]
        powers = (BATCH >> k for k in range(BATCH.bit_length()))
        return tuple(n for n in powers if n == BATCH or all(n * size % SLICE_ALIGNMENT_BYTES == 0 for size in rows))


def _layer(suite: str, name: str, *sizes: int) -> Layer:
    width, height, channels, outputs, kernel, pad, stride = sizes
    return Layer(suite, name, width, height, channels, outputs, kernel, pad, stride)


# fmt: off
LAYERS = tuple(
    _layer(*row)
    for row in (
        # suite, name, width, height, channels, outputs, kernel, pad, stride
        ("alexnet", "alexnet conv2", 27, 27, 64, 192, 5, 2, 1),
        ("alexnet", "alexnet conv3", 13, 13, 192, 384, 3, 1, 1),
        ("alexnet", "alexnet conv4", 13, 13, 384, 384, 3, 1, 1),
        ("alexnet", "alexnet conv5", 13, 13, 384, 256, 3, 1, 1),
        ("deepbench", "ocr 480x48", 480, 48, 1, 16, 3, 1, 1),
        ("deepbench", "ocr 240x24", 240, 24, 16, 32, 3, 1, 1),
        ("deepbench", "ocr 120x12", 120, 12, 32, 64, 3, 1, 1),
        ("deepbench", "ocr 60x6", 60, 6, 64, 128, 3, 1, 1),
        ("deepbench", "face 108x108", 108, 108, 3, 64, 3, 1, 2),
        ("deepbench", "face 54x54", 54, 54, 64, 64, 3, 1, 1),
        ("deepbench", "face 27x27", 27, 27, 128, 128, 3, 1, 1),
        ("deepbench", "face 14x14", 14, 14, 128, 256, 3, 1, 1),
        ("deepbench", "face 7x7", 7, 7, 256, 512, 3, 1, 1),
        ("deepbench", "vision 224x224", 224, 224, 3, 64, 3, 1, 1),
        ("deepbench", "vision 112x112", 112, 112, 64, 128, 3, 1, 1),
        ("deepbench", "vision 56x56", 56, 56, 128, 256, 3, 1, 1),
        ("deepbench", "vision 28x28", 28, 28, 256, 512, 3, 1, 1),
        ("deepbench", "vision 14x14", 14, 14, 512, 512, 3, 1, 1),
        ("deepbench", "vision 7x7", 7, 7, 512, 512, 3, 1, 1),
        ("deepbench", "vision 28x28 5x5", 28, 28, 192, 32, 5, 2, 1),
        ("deepbench", "vision 14x14 5x5", 14, 14, 512, 48, 5, 2, 1),
        ("deepbench", "vision 7x7 5x5", 7, 7, 832, 128, 5, 2, 1),
        ("deepbench", "resnet 56x56", 56, 56, 64, 64, 3, 1, 1),
        ("deepbench", "resnet 28x28", 28, 28, 128, 128, 3, 1, 1),
        ("deepbench", "resnet 14x14", 14, 14, 256, 256, 3, 1, 1),
        ("deepbench", "speaker 350x80", 350, 80, 64, 64, 3, 1, 1),
        ("deepbench", "speaker 175x40", 175, 40, 128, 128, 3, 1, 1),
        ("deepbench", "speaker 84x20", 84, 20, 256, 256, 3, 1, 1),
        ("deepbench", "speaker 42x10", 42, 10, 512, 512, 3, 1, 1),
        ("deepbench", "speaker 700x161 5x5", 700, 161, 1, 64, 5, 1, 2),
        ("deepbench", "speaker 350x80 5x5", 350, 80, 64, 128, 5, 1, 2),
        ("deepbench", "speaker 175x40 5x5", 175, 40, 128, 256, 5, 1, 2),
        ("deepbench", "speaker 84x20 5x5", 84, 20, 256, 512, 5, 1, 2),
    )
)
# fmt: on


def operations(precision: Precision, only: tuple[str, ...] = ()) -> tuple[Operation, ...]:
    """Every pass of the layers whose name holds one of the words `only`, the least work first: figures of many
    operations are worth more than those of one large one."""
    layers = (layer for layer in LAYERS if not only or any(word in layer.name for word in only))
    ordered = sorted(layers, key=lambda layer: layer.flops)
    return tuple(
        Operation(layer, which, precision)
        for layer in ordered
        for which in PASSES
        if which != "D" or layer.channels > FIRST_LAYER_CHANNELS
    )
