"""Cases of launches: an operation, its attributes, the shapes of its operands, and the kind of their values.

Shapes are small and awkward on purpose: channels that no vector divides, images of one pixel, a group for each channel,
sums long enough to be split into parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from mbc.ir.control import CONTROL_BYTES
from mbc.ir.graph import Attributes
from mbc.ir.types import DType, Precision, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda import KERNELS
from mbc.ops import KINDS, POINTWISE
from mbc.ops.activation import Scale
from mbc.ops.adaptive_pool import AdaptiveMaxPool, AdaptivePool
from mbc.ops.along import Largest, Softmax
from mbc.ops.arithmetic import Broadcast
from mbc.ops.attention import Attention
from mbc.ops.augment import Augment
from mbc.ops.base import Array, NoAttributes
from mbc.ops.batch_normalize import BatchNormalize, BatchNormalizeBackward, CombineStatistics, UpdateRunning
from mbc.ops.comparison import Relation, Select
from mbc.ops.control_record import control_record
from mbc.ops.convolution import Convolution
from mbc.ops.dice import Dice, DiceMeanBackward
from mbc.ops.elementwise_loss import (
    BinaryCrossEntropy,
    BinaryCrossEntropyBackward,
    PlainLossBackward,
    SmoothL1,
    SmoothL1Backward,
)
from mbc.ops.fused import launch_kind
from mbc.ops.group_norm import GroupNorm, LayerNorm
from mbc.ops.instance_norm import InstanceNormalize, InstanceNormalizeBackward
from mbc.ops.kl_divergence import KlBackward
from mbc.ops.layerwise import LarsRatio
from mbc.ops.loss import CrossEntropy, CrossEntropyBackward, WeightedSum
from mbc.ops.matmul import Matmul
from mbc.ops.matrix import Cast, Linear
from mbc.ops.mean_iou import MeanIou
from mbc.ops.piecewise import Clamp, Indicator
from mbc.ops.pointwise import Pointwise
from mbc.ops.pooling import AveragePool, MaxPool
from mbc.ops.random import ChannelDropout, Dropout, DropPath
from mbc.ops.rearrange import Pad, Rearrange, Split, StridedSlice
from mbc.ops.reduce import Expand, Reduce, reduced_shape
from mbc.ops.resize import Resize
from mbc.ops.response import Lrn
from mbc.ops.rms_norm import RmsNorm
from mbc.ops.shape import ChannelSlice, Upsample
from mbc.ops.soft_cross_entropy import SoftTargetBackward
from mbc.ops.standardize import Standardize
from mbc.ops.top_k import TopK, TopKMean
from mbc.ops.update import AdamW, Ema, Guard, Sgd
from mbc.ops.weighted_cross_entropy import ClassWeights, WeightedMean, WeightedMeanBackward
from mbc.ops.window_bias import WindowBias
from tests.kernels.statistics import grouped
from tests.ops.pointwise_inputs import examples, inputs, steps, values

PRECISIONS = (Precision.FP32, Precision.BF16, Precision.FP16)

Shape = tuple[int, ...]
Make = Callable[[np.random.Generator, Shape], Array]


@dataclass(frozen=True)
class Operand:
    """An operand of a case. `dtype`: `working`, `master`, or the name of a type."""

    dtype: str
    shape: Shape
    make: Make

    def type(self, precision: Precision) -> TensorType:
        types = {"working": precision.working, "master": precision.master}
        return TensorType(self.shape, types.get(self.dtype) or DType(self.dtype))


@dataclass(frozen=True)
class Case:
    name: str
    kind: str
    attributes: Attributes
    operands: tuple[Operand, ...]
    first_row: int = 0
    precisions: tuple[Precision, ...] = PRECISIONS

    def request(self, precision: Precision) -> Request:
        inputs = tuple(operand.type(precision) for operand in self.operands)
        if self.kind == "convert":
            return Request(self.kind, self.attributes, inputs, (inputs[0],), precision)
        outputs = launch_kind(self.kind, self.attributes).shape(self.attributes, inputs)
        return Request(self.kind, self.attributes, inputs, outputs, precision)


@dataclass
class Cases:
    cases: list[Case] = field(default_factory=list[Case])

    def add(
        self,
        kind: str,
        attributes: Attributes,
        *operands: Operand,
        note: str = "",
        first_row: int = 0,
        precisions: tuple[Precision, ...] = PRECISIONS,
    ) -> None:
        shapes = "x".join(map(str, operands[0].shape))
        name = "-".join(part for part in (kind, note, shapes) if part)
        assert name not in {case.name for case in self.cases}, name
        self.cases.append(Case(name, kind, attributes, operands, first_row, precisions))


def normal(rng: np.random.Generator, shape: Shape) -> Array:
    return rng.standard_normal(shape)


def coarse(rng: np.random.Generator, shape: Shape) -> Array:
    """Return random values, many of which are equal."""
    return np.round(rng.standard_normal(shape) * 2) / 2


def special(rng: np.random.Generator, shape: Shape) -> Array:
    """Return values with infinities, zeros of both signs, and NaNs so far apart that no window of three has two."""
    values = coarse(rng, shape)
    for place, value in enumerate((np.nan, -np.inf, -np.inf, np.inf, -0.0)):
        values[..., place::5, place::5] = value
    return values


def wide(rng: np.random.Generator, shape: Shape) -> Array:
    return 4 * rng.standard_normal(shape)


def positive(rng: np.random.Generator, shape: Shape) -> Array:
    return rng.uniform(0.1, 3.0, shape)


def far(rng: np.random.Generator, shape: Shape) -> Array:
    """Return values with a mean so large that computing a variance from squares would leave no digits."""
    return 1000 + rng.standard_normal(shape)


def off(rng: np.random.Generator, shape: Shape) -> Array:
    """Return values with a mean of the size of their deviation, to which the error of a mean is relative."""
    return 0.5 + rng.standard_normal(shape)


def outlier(rng: np.random.Generator, shape: Shape) -> Array:
    """Return values whose first element of each channel, the origin of distances, is far from all others."""
    values = off(rng, shape)
    values.reshape(*shape[:2], -1)[0, :, 0] = 100
    return values


def numbers(below: int) -> Make:
    return lambda rng, shape: rng.integers(0, below, shape, dtype=np.int32)


def bytes_below(count: int) -> Make:
    return lambda rng, shape: rng.integers(0, count, shape).astype(np.uint8)


def control(**fields: float) -> Operand:
    def make(_: np.random.Generator, shape: Shape) -> Array:
        block = np.zeros(shape, np.uint8)
        record = control_record(block)
        start = {
            "step": 3, "seed": 0x123456789ABC, "global_seed": 0xCBA987654321, "first_row": 40, "learning_rate": 0.1,
            "loss_scale": 4.0, "gradient_scale": 8.0, "proceed": 1, "updates": 5,
        }  # fmt: skip
        for name, value in (start | fields).items():
            record[name] = value
        return block

    return Operand("uint8", (CONTROL_BYTES,), make)


def w(*shape: int, make: Make = normal) -> Operand:
    return Operand("working", shape, make)


def m(*shape: int, make: Make = normal) -> Operand:
    return Operand("master", shape, make)


NONE = NoAttributes()
LONG: tuple[Shape, ...] = ((3, 8, 110, 110), (1, 3, 181, 183), (700, 33), (2, 70, 5, 3), (2, 288, 20, 21))
SHAPES: tuple[Shape, ...] = ((3, 16, 5, 6), (2, 7, 3, 5), (5, 9), (4, 24, 1, 1), (1, 1, 4, 7))


def _elementwise(cases: Cases) -> None:
    for function in POINTWISE.values():
        for number, a in enumerate(examples(function)):
            _pointwise(cases, function, a, f"{number}" * (number > 0))
    for shape in SHAPES:
        cases.add("add", NONE, w(*shape), w(*shape))
        cases.add("mul", NONE, w(*shape), w(*shape))
    # Channels and pixels by the vector and not; several tiles of channels; one pixel.
    for shape in ((3, 16, 5, 6), (2, 7, 3, 8), (2, 264, 3, 3), (4, 24, 1, 1)):
        gate = w(*shape[:2], 1, 1)
        cases.add("broadcast_mul", NONE, w(*shape), gate)
        cases.add("broadcast_add", NONE, w(*shape), gate)
        cases.add("pixel_sum", NONE, w(*shape))
        cases.add("pixel_dot", NONE, w(*shape), w(*shape))
    _broadcast(cases)
    _gather(cases)
    cases.add("clamp", Clamp((-1.0,), (1.0,)), w(*SHAPES[0], make=special), note="special")
    for operator in ("eq", "ne", "lt", "le", "gt", "ge"):
        cases.add("indicator", Indicator(operator, 0.5), w(*SHAPES[1], make=coarse), note=operator)
    for shape, axes in (
        ((3, 16, 5, 6), (1,)),
        ((3, 7, 5, 6), (3,)),
        ((2, 8, 4, 9), (2,)),
        ((5, 700), (1,)),
        ((2, 3, 2, 5, 4), (2, 4)),
        ((2, 3, 40, 41), (2, 3)),
    ):
        if len(axes) == 1:
            cases.add("softmax", Softmax(*axes), w(*shape, make=wide), note=f"{axes[0]}")
            cases.add("softmax_backward", Softmax(*axes), w(*shape, make=positive), w(*shape), note=f"{axes[0]}")
            cases.add("log_softmax", Softmax(*axes), w(*shape, make=wide), note=f"{axes[0]}")
            cases.add("log_softmax_backward", Softmax(*axes), w(*shape), w(*shape), note=f"{axes[0]}")
        left = reduced_shape(TensorType(shape, DType.FP32), axes, axes == (1,))
        note = "x".join(map(str, axes))
        cases.add("amax", Largest(axes, left), w(*shape, make=coarse), note=note)
        cases.add(
            "amax_backward",
            Largest(axes, left),
            w(*shape, make=coarse),
            w(shape[0], *left, make=coarse),
            w(shape[0], *left),
            note=note,
        )
    cases.add("scale", Scale(-0.5, 2.0), w(3, 5, 40, 41))
    for shape in ((3, 24, 5, 7), (2, 8, 9, 1), (5, 16), (4, 64, 1, 1), (2, 136, 3, 5)):
        signs = Operand("uint8", (shape[0], shape[1] // 8, *shape[2:]), bytes_below(256))
        cases.add("relu_mask", NONE, w(*shape))
        cases.add("relu_mask", NONE, w(*shape, make=special), note="special")
        cases.add("relu_backward_masked", NONE, w(*shape), signs)


def _pointwise(cases: Cases, function: Pointwise, a: Attributes, note: str) -> None:
    """Add a function and its gradient: of numbers of its domain, and of those where its pieces meet."""

    def outputs(make: Make, rng: np.random.Generator, shape: Shape) -> Array:
        return values(function, a, make(rng, shape))

    wide = ((SHAPES[0], note, inputs), (SHAPES[1], note, inputs)) if not note else ()
    for shape, name, draw in (*wide, ((5, 41), f"{note}steps", steps)):
        make = partial(draw, function, a)
        read = partial(outputs, make) if function.of_output else make
        cases.add(function.name, a, w(*shape, make=make), note=name)
        cases.add(f"{function.name}_backward", a, w(*shape, make=read), w(*shape), note=name)


def _broadcast(cases: Cases) -> None:
    # One operand or both repeated, along any axes, by the vector and not; of one shape; vectors along an axis.
    for left, right in (
        ((3, 16, 5, 6), (16,)), ((2, 8, 3, 8), (8, 1, 1)), ((2, 7, 3, 5), (2, 1, 3, 5)),
        ((2, 16, 4, 8), (1, 16, 4, 8)), ((4, 5, 24), (5, 24)), ((3, 5, 9), (3, 5, 1)),
        ((2, 3, 2, 5, 4), (3, 1, 5, 1)), ((5, 16), (5, 16)), ((2, 2, 8, 3, 7), (2, 8, 1, 1)),
    ):  # fmt: skip
        note = "x".join(map(str, right))
        for operator in ("add", "sub", "mul", "div", "rsub", "rdiv", "prelu", "prelu_slope"):
            first, second = (w(*s, make=positive) if "div" in operator else w(*s) for s in (left, right))
            cases.add("broadcast", Broadcast(operator), first, second, note=f"{operator}{note}")
        for operator in ("maximum", "minimum", "fill", "keep", "rfill", "rkeep"):
            selection = Select(operator, value=0.5) if operator != "rfill" else Select(operator, infinite=-1)
            first, second = (w(*s, make=coarse) for s in (left, right))
            cases.add("select", selection, first, second, note=f"{operator}{note}")
        for operator in ("eq", "ne", "lt", "le", "gt", "ge", "max_share", "rmax_share"):
            first, second = (w(*s, make=coarse) for s in (left, right))
            cases.add("relation", Relation(operator), first, second, note=f"{operator}{note}")
    cases.add("broadcast", Broadcast("mul", 2), w(3, 5, 16), w(16), note="last")
    for shape, axes, keep in (
        ((3, 16, 5, 6), (1,), True), ((3, 16, 5, 6), (2, 3), False), ((2, 8, 4, 9), (2,), False),
        ((2, 16, 3, 8), (1, 3), True), ((2, 3, 2, 5, 4), (1, 3), False), ((5, 700), (1,), False),
        ((2, 3, 90, 91), (1, 2, 3), False), ((3, 2, 8, 7, 8), (1,), False), ((2, 3, 97, 5), (1,), False),
        ((2, 64, 24), (1,), False), ((2, 3, 16, 18), (2, 3), False), ((2, 3, 16, 3, 7), (3, 4), False),
    ):  # fmt: skip
        x = TensorType(shape, DType.FP32)
        left = reduced_shape(x, axes, keep)
        note = "x".join(map(str, axes))
        cases.add("reduce_sum", Reduce(axes, left, 0.5), w(*shape), note=note)
        cases.add("reduce_dot", Reduce(axes, left), w(*shape), w(*shape), note=note)
        cases.add("expand", Expand(axes, shape[1:], 0.5), w(shape[0], *left), note=f"{note}to{shape[-1]}")
        cases.add("row_reduce_sum", Reduce(axes, left, -1.0), w(*shape), note=note)
        cases.add("row_reduce_dot", Reduce(axes, left), w(*shape), w(*shape), note=note)
    for shape in ((3, 16, 5, 6), (40, 8, 20, 21), (12, 96, 14, 14), (12, 97, 9, 9), (64, 24, 3, 3), (9, 3, 33, 31)):
        cases.add("row_reduce_sum", Reduce((), shape[1:]), w(*shape), note="rows")
        cases.add("row_reduce_dot", Reduce((2, 3), (1, shape[1], 1, 1)), w(*shape), w(*shape), note="channels")


def _gather(cases: Cases) -> None:
    for shape, factors, order, merged in (
        ((2, 16, 3, 8), ((16,), (3,), (8,)), (1, 2, 0), (1, 1, 1)),
        ((3, 5, 4, 7), ((5,), (4,), (7,)), (0, 2, 1), (1, 1, 1)),
        ((2, 24, 3, 5), ((3, 8), (3,), (5,)), (1, 0, 2, 3), (2, 1, 1)),
        ((2, 12, 3, 5), ((3, 2, 2), (3,), (5,)), (0, 3, 1, 4, 2), (1, 2, 2)),
        ((2, 3, 6, 10), ((3,), (3, 2), (5, 2)), (0, 2, 4, 1, 3), (3, 1, 1)),
        ((2, 6, 20), ((6,), (20,)), (1, 0), (1, 1)),
        ((2, 3, 4, 5, 6), ((3,), (4,), (5,), (6,)), (3, 1, 0, 2), (1, 1, 2)),
    ):
        cases.add("rearrange", Rearrange(factors, order, merged), w(*shape), note="".join(map(str, order)))
    for shape, start, step, spread, count in (
        ((2, 16, 5, 6), (8, 0, 0), (1, 1, 1), (1, 1, 1), (8, 5, 6)),
        ((2, 16, 5, 6), (0, 1, 0), (1, 2, 2), (1, 1, 1), (16, 2, 3)),
        ((2, 16, 2, 3), (0, -1, 0), (1, 1, 1), (1, 2, 2), (16, 5, 6)),
        ((2, 7, 3, 4), (0, -2, -1), (1, 1, 1), (1, 1, 1), (7, 6, 7)),
        ((2, 8, 3, 4), (-8, -2, 1), (1, 1, 1), (1, 1, 1), (24, 4, 4)),
        ((3, 40), (5,), (3,), (1,), (11,)),
        ((3, 11), (-5,), (1,), (3,), (40,)),
        ((2, 3, 4, 2, 16), (0, 1, 0, 0), (1, 1, 1, 1), (1, 1, 1, 1), (3, 2, 2, 16)),
    ):
        a = StridedSlice(shape[1:], start, step, spread, count)
        cases.add("strided_slice", a, w(*shape), note=f"{'x'.join(map(str, start))}to{count[-1]}")
        around = replace(a, value=-1.5)
        cases.add("strided_slice", around, w(*shape), note=f"{'x'.join(map(str, start))}around{count[-1]}")
    sampled = StridedSlice((6, 4, 6), (0, 0, 0), (2, 1, 3), (1, 1, 1), (3, 4, 2))
    cases.add("strided_slice", sampled, Operand("int32", (2, 6, 4, 6), numbers(9)), note="classes")
    for shape, before, after in (
        ((2, 8, 3, 4), (0, 2, 1), (0, 1, 3)),
        ((2, 3, 5, 4), (1, 0, 3), (2, 4, 0)),
        ((2, 16, 4, 2), (0, 1, 1), (0, 1, 1)),
        ((3, 9), (8,), (8,)),
        ((3, 5, 7), (0, 2), (0, 3)),
        ((2, 8, 4, 3, 5), (0, 1, 0, 2), (0, 3, 1, 1)),
    ):
        wide = (shape[0], *map(sum, zip(shape[1:], before, after, strict=True)))
        for mode in ("replicate", "reflect", "wrap"):
            a = Pad(mode, shape[1:], before, after)
            cases.add("pad", a, w(*shape), note=f"{mode}{wide[-1]}")
            cases.add("pad_backward", a, w(*wide), note=mode)
    for shape, sizes in (
        ((2, 16, 3, 8), (8, 8)),
        ((3, 7, 4, 5), (1, 4, 2)),
        ((4, 24), (16, 8)),
        ((2, 3, 5), (1, 1, 1)),
    ):
        cases.add("split", Split(sizes), w(*shape))


def _channels(cases: Cases) -> None:
    for shape in (*SHAPES, *LONG):
        c = shape[1]
        count = int(np.prod(shape)) // c
        if shape not in LONG:
            cases.add("bias_add", NONE, w(*shape), m(c))
        cases.add("channel_sum", NONE, w(*shape))
        cases.add("batch_statistics", NONE, w(*shape, make=off))
        cases.add("batch_statistics", NONE, w(*shape, make=outlier), note="outlier")
        cases.add("batch_statistics", NONE, w(*shape, make=far), note="far")
        vectors = (m(c), m(c, make=positive))
        cases.add("batch_normalize", BatchNormalize(1e-5), w(*shape), *vectors, note="plain")
        cases.add("batch_normalize", BatchNormalize(1e-5), w(*shape), *vectors, m(c), m(c))
        cases.add("batch_normalize_backward_reduce", BatchNormalize(1e-3), w(*shape), w(*shape), *vectors)
        backward = BatchNormalizeBackward(1e-5, count)
        cases.add("batch_normalize_backward_frozen", BatchNormalize(1e-5), w(*shape), m(c, make=positive), m(c))
        cases.add("batch_normalize_backward", backward, w(*shape), w(*shape), *vectors, m(c), m(c), note="plain")
        cases.add("batch_normalize_backward", backward, w(*shape), w(*shape), *vectors, m(c), m(c), m(c))
    _samples(cases)
    for channels in ((7, 300), (64,), (1,) * 33, (5, 8, 1, 40)):
        pairs = [vector for c in channels for vector in (m(c), m(c, make=positive))]
        cases.add("concat_statistics", NONE, *pairs, note=f"{len(channels)}")
    for ranks, channels in ((2, 300), (3, 7), (8, 64)):
        gathered = (m(ranks, channels, make=far), m(ranks, channels, make=positive))
        counts = CombineStatistics(tuple(range(50, 50 + ranks)))
        cases.add("combine_statistics", counts, *gathered, note=f"{ranks}")
    for ranks, operands in ((2, 2), (3, 1), (8, 5)):
        cases.add("sum_gathered", NONE, *(m(ranks, 70) for _ in range(operands)), note=f"{operands}")
    for proceed in (0, 1):
        states = (m(37), m(37, make=positive), m(37), m(37, make=positive))
        block = control(proceed=proceed)
        cases.add("update_running", UpdateRunning(0.1, 50), *states, block, note=f"proceed{proceed}")


def _samples(cases: Cases) -> None:
    """Add normalisation of each sample by itself: by the vector and not, in one part and in several."""
    for shape in ((3, 16, 5, 6), (2, 7, 3, 5), (3, 300, 17), (2, 24, 60, 61), (2, 32, 4, 40, 41), (5, 1, 9), (1, 8, 2)):
        c, statistic = shape[1], (*shape[:2], *(1,) * (len(shape) - 2))
        samples = (m(*statistic), m(*statistic, make=positive))
        for make, note in ((off, ""), (outlier, "outlier"), (far, "far")):
            cases.add("instance_statistics", NONE, w(*shape, make=make), note=note)
        backward = InstanceNormalizeBackward(1e-5, int(np.prod(shape[2:])))
        cases.add("instance_normalize_backward_reduce", InstanceNormalize(1e-3), w(*shape), w(*shape), *samples)
        for vectors in (0, 1):
            note = "plain" * (not vectors)
            operands = (w(*shape), *samples, *(m(c), m(c)) * vectors)
            cases.add("instance_normalize", InstanceNormalize(1e-5), *operands, note=note)
            operands = (w(*shape), w(*shape), *samples, m(*statistic), m(*statistic), *(m(c),) * vectors)
            cases.add("instance_normalize_backward", backward, *operands, note=note)


def _filters(cases: Cases) -> None:
    # Filters that share a block and that have one to themselves, of even and odd sizes; with a gain and without.
    for shape in ((7, 3, 3, 3), (16, 1, 3, 3), (5, 40, 3, 5), (300, 16, 1, 1), (3, 700, 3, 3)):
        a, k = Standardize(1e-3, 0.7), shape[0]
        for gain in ((), (m(k),)):
            note = "gained" * len(gain)
            cases.add("standardize_filters", a, m(*shape, make=off), *gain, note=note)
            operands = (m(*shape), m(*shape), m(k), m(k, make=positive), *gain)
            cases.add("standardize_filters_backward", a, *operands, note=note)


def _groups(cases: Cases) -> None:
    # By the vector and not, in either layout; by warps and by blocks; sums in parts.
    for shape, groups in (
        ((3, 16, 5, 6), 4), ((2, 32, 3, 8), 2), ((2, 6, 40, 41), 3), ((4, 24), 3), ((3, 16, 5, 6), 0),
        ((2, 7, 3, 5), 0), ((3, 515), 0), ((1, 40, 64, 65), 0), ((3, 96, 5, 7), 0), ((2, 97, 3, 5), 0),
        ((7, 3, 9, 11), 0), ((131, 64), 0), ((5, 1000), 0), ((3, 768, 7), 0), ((2, 24, 20, 21), 0), ((3, 2400), 0),
    ):  # fmt: skip
        a = GroupNorm(1e-3, groups) if groups else LayerNorm(1e-3)
        kind, c = "group_norm" if groups else "layer_norm", shape[1]
        pixels = (1,) * (len(shape) - 2) if groups else shape[2:]
        statistics = (m(shape[0], max(1, groups), *pixels), m(shape[0], max(1, groups), *pixels, make=positive))
        for vectors in (0, 1):
            note = "plain" * (not vectors)
            cases.add(kind, a, w(*shape, make=off), *(m(c), m(c)) * vectors, note=note)
            cases.add(f"{kind}_backward", a, w(*shape), w(*shape), *statistics, *(m(c),) * vectors, note=note)
        cases.add(f"{kind}_backward_reduce", a, w(*shape), w(*shape), *statistics)
        if not groups:
            rms, inverse = RmsNorm(1e-3), statistics[1]
            cases.add("rms_norm", rms, w(*shape, make=off), m(c))
            cases.add("rms_norm_backward", rms, w(*shape), w(*shape), inverse, m(c))
            cases.add("rms_norm_backward_reduce", rms, w(*shape), w(*shape), inverse)


POOLS = (
    ((7, 9), (3, 3), (2, 2), (1, 1, 1, 1), False),
    ((8, 6), (2, 2), (2, 2), (0, 0, 0, 0), False),
    ((7, 10), (3, 2), (2, 3), (1, 0, 0, 1), True),
    ((5, 6), (3, 3), (1, 1), (1, 1, 2, 0), False),
    ((7, 7), (2, 3), (3, 4), (0, 0, 0, 0), True),
    ((1, 1), (1, 1), (1, 1), (0, 0, 0, 0), False),
    ((41, 12), (3, 3), (2, 2), (1, 0, 0, 1), False),
    ((40, 9), (3, 3), (1, 1), (1, 1, 1, 1), False),
    ((43, 11), (2, 2), (2, 2), (0, 1, 1, 0), True),
    ((6, 7), (3, 3), (2, 2), (0, 0, 0, 0), True),
    ((9, 8), (2, 2), (3, 3), (1, 1, 0, 0), False),
    ((4, 5, 6), (2, 3, 2), (2, 2, 1), (1, 0, 1, 1, 0, 1), True),
    ((3, 4, 7), (2, 2, 2), (2, 2, 2), (0, 0, 0, 0, 0, 0), False),
    ((5, 3, 4), (3, 3, 3), (1, 1, 1), (1, 1, 1, 1, 1, 1), False),
    ((9, 8), (3, 2), (2, 1), (2, 1, 0, 1), True, (2, 3)),
    ((7, 5, 6), (2, 3, 2), (1, 2, 2), (1, 0, 1, 1, 0, 1), False, (3, 1, 2)),
)


def _pools(cases: Cases) -> None:
    for number, (size, kernel, stride, pad, ceil, *dilation) in enumerate(POOLS):
        apart = dilation[0] if dilation else ()
        for rows, channels in ((2, 16), (3, 5)):
            x = (rows, channels, *size)
            largest = MaxPool(size, kernel, stride, pad, ceil, index=True, dilation=apart)
            y = (rows, channels, *largest.output_size)
            note = f"{number}"
            cases.add("max_pool", replace(largest, index=False), w(*x, make=coarse), note=note)
            cases.add("max_pool", largest, w(*x, make=coarse), note=f"index{number}")
            if len(size) < 3:  # where no window has two NaNs
                cases.add("max_pool", largest, w(*x, make=special), note=f"special{number}")
            index = Operand("uint8", y, bytes_below(math.prod(kernel)))
            cases.add("max_pool_backward", largest, index, w(*y), note=note)
            for count_pad in () if apart else (False, True):
                average = AveragePool(size, kernel, stride, pad, ceil, count_pad)
                cases.add("avg_pool", average, w(*x), note=f"{number}{'padded' * count_pad}")
                cases.add("avg_pool_backward", average, w(*y), note=f"{number}{'padded' * count_pad}")
    for rows, channels, *size in ((3, 40, 7, 7), (2, 5, 6, 9), (3, 40, 2, 3, 5)):
        whole = AveragePool(tuple(size), tuple(size))
        cases.add("avg_pool", whole, w(rows, channels, *size), note="whole")
        cases.add("avg_pool_backward", whole, w(rows, channels, *whole.output_size), note=f"whole{channels}")
    far_apart = AveragePool((200_000,), (66_000,), (66_000,))  # a pixel times a stride is above 2^32
    cases.add("avg_pool_backward", far_apart, w(1, 1, *far_apart.output_size), note="far-apart")


def _adaptive(cases: Cases) -> None:
    # Windows that share pixels, more windows than pixels, one window, plain ones.
    for size, output_size in (
        ((7, 9), (3, 2)),
        ((5, 4), (7, 6)),
        ((6, 5), (1, 1)),
        ((8, 6), (4, 3)),
        ((3, 10), (2, 7)),
        ((4, 5, 3), (3, 2, 5)),
        ((1, 4, 5), (2, 3, 1)),
    ):
        for rows, channels in ((2, 16), (3, 5)):
            x, y = (rows, channels, *size), (rows, channels, *output_size)
            note = "x".join(map(str, output_size))
            mean, largest = AdaptivePool(size, output_size), AdaptiveMaxPool(size, output_size, index=True)
            cases.add("adaptive_avg_pool", mean, w(*x), note=note)
            cases.add("adaptive_avg_pool_backward", mean, w(*y), note="x".join(map(str, size)))
            cases.add("adaptive_max_pool", AdaptiveMaxPool(size, output_size), w(*x, make=coarse), note=note)
            cases.add("adaptive_max_pool", largest, w(*x, make=coarse), note=f"index{note}")
            index = Operand("int32", y, numbers(math.prod(size)))
            cases.add("adaptive_max_pool_backward", largest, index, w(*y), note="x".join(map(str, size)))


def _images(cases: Cases) -> None:
    for size in (5, 4, 1, 3, 80):
        for shape in ((2, 20, 5, 7), (3, 33, 1, 1), (2, 3, 6, 6)):
            attributes = Lrn(size, 0.5, 0.75, 2.0)
            cases.add("lrn", attributes, w(*shape), note=f"{size}")
            cases.add("lrn_backward", attributes, w(*shape), w(*shape), note=f"{size}")
    for factor in ((2, 2), (1, 3)):
        for rows, channels, height, width in ((2, 16, 3, 4), (3, 5, 2, 1)):
            note = "by".join(map(str, factor))
            large = (rows, channels, height * factor[0], width * factor[1])
            cases.add("upsample", Upsample(factor), w(rows, channels, height, width), note=note)
            cases.add("upsample_backward", Upsample(factor), w(*large), note=note)

    for bilinear, size, output_size in (
        (True, (3, 4), (6, 8)),
        (True, (5, 3), (7, 8)),
        (True, (6, 7), (4, 3)),
        (True, (1, 2), (4, 1)),
        (False, (5, 3), (7, 8)),
        (False, (6, 7), (4, 9)),
    ):
        for rows, channels in ((2, 16), (3, 5)):
            a = Resize(size, output_size, bilinear)
            note = f"{'bilinear' if bilinear else 'nearest'}{a.output_size[0]}"
            cases.add("resize", a, w(rows, channels, *a.size), note=note)
            cases.add("resize_backward", a, w(rows, channels, *a.output_size), note=note)
    for number, a in enumerate((
        Resize((5, 3), (7, 8), False, "nearest_exact"),
        Resize((6, 7), (4, 3), True, "", True),
        Resize((5, 1), (1, 4), True, "", True),
        Resize((4, 3), (9, 7), False, "bicubic"),
        Resize((9, 7), (4, 3), False, "bicubic"),
        Resize((2, 4), (7, 1), False, "bicubic", True),
        Resize((5, 7), (6, 4), False, "bicubic", False, (10, 13, 5, 3)),
        Resize((6, 7), (4, 15), True, "", False, (10, 7, 10, 22)),
        Resize((9, 5), (11, 3), False, "", False, (10, 13, 10, 7)),
        Resize((9,), (11,), True, "", False, (10, 13)),
    )):  # fmt: skip
        for rows, channels in ((2, 16), (3, 5)):
            note = f"{a.method or ('linear' if a.bilinear else 'nearest')}{number}"
            cases.add("resize", a, w(rows, channels, *a.size), note=note)
            cases.add("resize_backward", a, w(rows, channels, *a.output_size), note=note)


def _moves(cases: Cases) -> None:
    for shape in (
        *SHAPES, (2, 3, 40, 41), (2, 3, 50, 42), (2, 3, 5, 7), (3, 67, 7, 9), (13,), (2, 24, 4, 8), (3, 80, 6, 6),
        (2, 97, 7, 7),
    ):  # fmt: skip
        cases.add("convert", NONE, w(*shape))
        cases.add("convert", NONE, m(*shape), note="fp32")
        cases.add("cast", Cast("fp32"), w(*shape), note="widen")
        for precision in (Precision.BF16, Precision.FP16):
            narrow = Cast(precision.working.value)
            cases.add("cast", narrow, m(*shape), note=f"narrow-{precision}", precisions=(precision,))
    cases.add("convert", NONE, Operand("uint8", (2, 35, 6, 7), bytes_below(9)), note="uint8")
    for shape in SHAPES:
        parts = [w(shape[0], count, *shape[2:]) for count in (8, 3, 16, shape[1])]
        cases.add("concat", NONE, w(*shape), *parts)
        cases.add("concat", NONE, w(shape[0], 8, *shape[2:]), w(shape[0], 24, *shape[2:]), note="even")
        wide = (shape[0], 40, *shape[2:])
        cases.add("channel_slice", ChannelSlice(8, 16), w(*wide), note="even")
        cases.add("channel_slice", ChannelSlice(3, 7), w(*wide), note="odd")
    for shape in (*SHAPES, (13,)):
        for first_row in (0, 3):
            attributes = Dropout(0.3, 0x9ABCDEF0)
            cases.add("dropout", attributes, w(*shape), control(), note=f"from{first_row}", first_row=first_row)
            cases.add("dropout_backward", attributes, w(*shape), control(), note=f"at{first_row}", first_row=first_row)

    for shape in ((9, 8, 3, 3), (3, 7, 4, 5), (7, 5), (13,)):
        if len(shape) > 1:
            attributes = ChannelDropout(0.3, 0x9ABCDEF0)
            cases.add("channel_dropout", attributes, w(*shape), control(), first_row=3)
            cases.add("channel_dropout_backward", attributes, w(*shape), control())
        attributes = DropPath(0.3, 0x9ABCDEF0)
        cases.add("drop_path", attributes, w(*shape), control(), first_row=3)
        cases.add("drop_path_backward", attributes, w(*shape), control(), first_row=3)


def _augment(cases: Cases) -> None:
    plain = Augment((9, 7), (6, 5), 0, (), (), False, 0.0, 0.0, 0.0, (0.4,), (0.25,), False, "")
    colours = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    three = replace(plain, mean=colours[0], std=colours[1])
    jitter = {"brightness": 0.4, "contrast": 0.3, "saturation": 0.5}
    for note, a in (
        ("flip", replace(plain, flip=True)),
        ("pad", replace(three, pad=2, crop=(9, 7), flip=True)),
        ("jitter", replace(three, channels_last=True, **jitter)),
        ("scale", replace(three, scale=(0.2, 0.9), ratio=(0.75, 4 / 3), flip=True, **jitter)),
        ("upsized", replace(three, channels_last=True, scale=(0.1, 0.3), ratio=(0.5, 2.0), crop=(9, 7))),
        ("many", replace(three, size=(70, 60), crop=(64, 50), flip=True, brightness=0.1)),
    ):
        channels = len(a.mean)
        shape = (5, *a.size, channels) if a.channels_last else (5, channels, *a.size)
        photo = Operand("uint8", shape, bytes_below(256))
        for precision in PRECISIONS:
            typed = replace(a, key=0x9ABCDEF0, dtype=precision.working.value)
            name = f"{note}-{precision}"
            first = 3 if note == "flip" else 0
            cases.add("augment", typed, photo, control(), note=name, precisions=(precision,), first_row=first)
            cases.add("centre_crop", typed, photo, note=name, precisions=(precision,))


def _losses(cases: Cases) -> None:
    for rows, classes, *rest in (
        (37, 10), (5, 1000), (1, 2), (2, 200), (1, 2500), (3, 7, 5, 6), (2, 5, 20, 21), (2, 2, 80, 60), (3, 3, 8, 6),
        (2, 4, 7, 4), (3, 2, 4, 3), (2, 33, 8, 8),
    ):  # fmt: skip
        target = Operand("int32", (rows, *rest), numbers(classes))
        logits = w(rows, classes, *rest, make=lambda rng, shape: 5 * rng.standard_normal(shape))
        for smoothing in (0.0, 0.1):
            note = f"smooth{smoothing}"
            cases.add("softmax_cross_entropy", CrossEntropy(smoothing), logits, target, note=note)
            backward = CrossEntropyBackward(smoothing, 0.7)
            # The scale keeps small gradients out of fp16's subnormal numbers.
            scale = control(loss_scale=65536.0)
            cases.add("softmax_cross_entropy_backward", backward, logits, target, scale, note=note)
    _target_losses(cases)
    wild = Operand("int32", (9,), lambda rng, shape: np.arange(-1, 8, dtype=np.int32))
    cases.add("softmax_cross_entropy", CrossEntropy(), w(9, 5), wild, note="wild")
    cases.add("softmax_cross_entropy_backward", CrossEntropyBackward(0.0, 1.0), w(9, 5), wild, control(), note="wild")
    wild = Operand("int32", (3,), lambda rng, shape: np.array((-1, 40, 39), np.int32))
    cases.add("softmax_cross_entropy", CrossEntropy(), w(3, 40), wild, note="wild-rows")
    cases.add(
        "softmax_cross_entropy_backward", CrossEntropyBackward(0.0, 1.0), w(3, 40), wild, control(), note="wild-rows"
    )
    wild = Operand("int32", (2, 4, 8), lambda rng, shape: np.arange(-1, 63, dtype=np.int32).reshape(shape) % 9 - 1)
    cases.add("softmax_cross_entropy", CrossEntropy(), w(2, 5, 4, 8), wild, note="wild-pixels")
    backward = CrossEntropyBackward(0.0, 1.0)
    cases.add("softmax_cross_entropy_backward", backward, w(2, 5, 4, 8), wild, control(), note="wild-pixels")
    wild = Operand("int32", (2, 4, 8), lambda rng, shape: np.arange(-1, 63, dtype=np.int32).reshape(shape) % 5 - 1)
    cases.add("softmax_cross_entropy", CrossEntropy(), w(2, 2, 4, 8), wild, note="wild-kept")
    cases.add("softmax_cross_entropy_backward", backward, w(2, 2, 4, 8), wild, control(), note="wild-kept")
    for shape in ((37, 3), (3, 5, 40, 41), (1,)):
        for kind, attributes, sides in (
            ("mse", NONE, [PlainLossBackward(0.5, side) for side in (0, 1)]),
            ("l1", NONE, [PlainLossBackward(0.5, side) for side in (0, 1)]),
            ("smooth_l1", SmoothL1(0.7), [SmoothL1Backward(0.7, 0.5, side) for side in (0, 1)]),
            (
                "binary_cross_entropy",
                BinaryCrossEntropy(2.5),
                [BinaryCrossEntropyBackward(2.5, 0.5, side) for side in (0, 1)],
            ),
        ):
            target = w(*shape, make=lambda rng, shape: rng.random(shape)) if attributes is not NONE else w(*shape)
            cases.add(kind, attributes, w(*shape), target)
            for backward in sides:
                note = f"side{backward.side}"
                cases.add(f"{kind}_backward", backward, w(*shape), target, control(loss_scale=1024.0), note=note)
        share = w(*shape, make=lambda rng, shape: rng.random(shape) * 0.998 + 0.001)
        cases.add("probability_cross_entropy", NONE, share, share)
        for side in (0, 1):
            kind, backward = "probability_cross_entropy_backward", PlainLossBackward(0.5, side)
            cases.add(kind, backward, share, share, control(loss_scale=4.0), note=f"side{side}")
    certain = w(4, 8, make=lambda rng, shape: rng.integers(0, 2, shape).astype(float))
    cases.add("probability_cross_entropy", NONE, certain, certain, note="certain")
    for count in (1, 3, 40):
        weights = tuple(0.1 * (i + 1) for i in range(count))
        cases.add("weighted_sum", WeightedSum(weights), *[m(1) for _ in range(count)], note=f"{count}")


def probabilities(rng: np.random.Generator, shape: Shape) -> Array:
    drawn = rng.exponential(size=shape)
    return drawn / drawn.sum(axis=1, keepdims=True)


DICES = {
    "": Dice(0.5, ()),
    "ignored": Dice(0.5, (1,), entropy=0.8),
    "batch": Dice(0.5, (), below=(0.25,), first=1, batch=True, share=0.5),
    "tversky": Dice(0.5, (), shares=(0.6, 1.4), squared=True, power=1.5),
    "focal": Dice(0.0, (), first=1000, entropy=1.0, focus=2.0, weights=(0.25, 0.75), share=0.5),
    "regions": Dice(0.5, (), first=1, sigmoid=True, batch=True, entropy=0.8, share=0.5),
    "focal-regions": Dice(0.5, (), squared=True, sigmoid=True, entropy=0.8, focus=1.5, weights=(0.25, 0.75)),
    "clipped": Dice(90.0, (), below=(0.0,), shares=(1.0, 1.0), power=0.75),
}


def _target_losses(cases: Cases) -> None:
    scale = control(loss_scale=65536.0)
    # The gradient of a target is a logarithm, which such a scale takes beyond fp16.
    scales = (scale, control(loss_scale=1024.0))
    for rows, classes, *rest in ((37, 10), (5, 130), (3, 7, 5, 6), (2, 3, 20, 14)):
        logits = w(rows, classes, *rest, make=lambda rng, shape: 5 * rng.standard_normal(shape))
        target = w(rows, classes, *rest, make=probabilities)
        cases.add("kl_divergence", NONE, logits, target)
        for side in (0, 1):
            backward = KlBackward(0.7, side)
            cases.add("kl_divergence_backward", backward, logits, target, scales[side], note=f"side{side}")
        for smoothing in (0.0, 0.1):
            note = f"smooth{smoothing}"
            cases.add("soft_target_cross_entropy", CrossEntropy(smoothing), logits, target, note=note)
            for side in (0, 1):
                backward = SoftTargetBackward(smoothing, 0.7, side)
                cases.add(
                    "soft_target_cross_entropy_backward",
                    backward,
                    logits,
                    target,
                    scales[side],
                    note=f"{note}-side{side}",
                )
        numbers_below = Operand("int32", (rows, *rest), numbers(classes))
        equal, counted = w(rows, classes, *rest, make=coarse), m(2, make=lambda rng, shape: np.array((33.0, 33.0)))
        for k in (1, 3):
            cases.add("top_k", TopK(k), equal, numbers_below, note=f"{k}")
            cases.add("top_k_mean", TopKMean(k, (1,), 0.25), equal, numbers_below, counted, note=f"{k}")
        for ignored in ((), (1,)):
            cases.add("class_overlap", MeanIou(ignored), equal, numbers_below, note="ignored" if ignored else "")
        overlap = m(rows, 2 * classes, make=lambda rng, shape: np.sort(rng.uniform(1, 40, shape), axis=1))
        total = m(2 * classes, make=lambda rng, shape: np.sort(rng.uniform(1, 40, shape)))
        for note, a in DICES.items():
            a = replace(a, first=min(a.first, classes))
            slopes = m(rows, 2 * a.columns(classes), *(1,) * len(rest))
            wanted = w(rows, classes, *rest, make=probabilities) if a.sigmoid else numbers_below
            cases.add("dice_sums", a, logits, wanted, note=note)
            cases.add("dice_sums_backward", a, logits, wanted, slopes, note=note)
            totals, backward = (total,) * a.has_total, DiceMeanBackward.of(a, 0.7)
            cases.add("dice_mean", a, overlap, *totals, note=f"{classes}{note}")
            cases.add("dice_mean_backward", backward, overlap, *totals, scale, note=f"{classes}{note}")
        counts = m(2, classes, make=lambda rng, shape: np.sort(rng.integers(0, 9, shape), axis=0))
        cases.add("mean_iou_of_overlap", NONE, counts, note=f"{rows}x{len(rest)}")
        sums = m(2, make=lambda rng, shape: np.array((29.5, 33.0)))
        for note, weights, ignored, smoothing in (
            ("weights", tuple(0.5 + c % 3 for c in range(classes)), (), 0.1),
            ("ignored", (), (2,), 0.1),
            ("both", tuple(0.25 * (c % 4) for c in range(classes)), (0,), 0.0),
        ):
            mean = WeightedMean(smoothing, weights, ignored, 0.25)
            backward = WeightedMeanBackward(smoothing, weights, ignored, 0.25, 0.7)
            cases.add(
                "class_weight_sum",
                ClassWeights(classes, weights, ignored, "fp32"),
                numbers_below,
                note=note + f"{classes}",
            )
            cases.add("weighted_cross_entropy_mean", mean, logits, numbers_below, sums, note=note)
            cases.add("weighted_cross_entropy_mean_backward", backward, logits, numbers_below, sums, scale, note=note)
    wild = Operand("int32", (9,), lambda rng, shape: np.arange(-1, 8, dtype=np.int32))
    sums = m(2, make=lambda rng, shape: np.array((3.0, 4.0)))
    counted = m(2, make=lambda rng, shape: np.array((4.0, 4.0)))
    for rest in ((), (1,)):
        # All k places count every target that is a class.
        outside = replace(
            wild, shape=(9, *rest), make=lambda rng, shape: np.arange(-1, 8, dtype=np.int32).reshape(shape)
        )
        cases.add("top_k", TopK(5), w(9, 5, *rest), outside, note="wild")
        cases.add("top_k_mean", TopKMean(5, (), 0.25), w(9, 5, *rest), outside, counted, note="wild")
        cases.add("class_overlap", MeanIou(()), w(9, 5, *rest), outside, note="wild")
        cases.add("dice_sums", Dice(1.0, ()), w(9, 5, *rest), outside, note="wild")
        slopes = m(9, 10, *rest)
        cases.add("dice_sums_backward", Dice(1.0, ()), w(9, 5, *rest), outside, slopes, note="wild")
    for ignored in ((), (-1,)):
        note, weights = f"wild{len(ignored)}", (1.0, 0.5, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0)
        backward = WeightedMeanBackward(0.0, weights[:5], ignored, 1.0, 1.0)
        cases.add(
            "weighted_cross_entropy_mean", WeightedMean(0.0, weights[:5], ignored, 1.0), w(9, 5), wild, sums, note=note
        )
        cases.add("weighted_cross_entropy_mean_backward", backward, w(9, 5), wild, sums, control(), note=note)
    cases.add(
        "weighted_cross_entropy_mean", WeightedMean(0.0, weights, (-1,), 1.0), w(9, 8), wild, sums, note="left-out"
    )


def _spoiled(value: float) -> Make:
    def make(rng: np.random.Generator, shape: Shape) -> Array:
        array = rng.standard_normal(shape)
        array.reshape(-1)[-1] = value
        return array

    return make


SIZES: list[Shape] = [(5,), (64, 3, 3, 3), (4099,), (1,)] * 18  # of gradients


def _parts(cases: Cases) -> None:
    """Add cases of rows that two and three ranks share: whole parts, a shorter part, a part of padding alone."""
    cases.add("norm", NONE, *(m(*size) for size in SIZES), m(9000), note="many")
    cases.add("norm", NONE, m(3, make=_spoiled(np.nan)), note="nan")
    cases.add("norm", NONE, m(70, make=_spoiled(-np.inf)), m(4), note="inf")
    for rows, part, rank in ((16, 8, 0), (16, 8, 1), (17, 6, 2), (4, 2, 2), (1031, 344, 2)):
        rest = (3, 3, 3) if rows < 100 else (5,)
        for proceed in (0, 1):
            block, note = control(rank=rank, proceed=proceed), f"{rows}-{rank}-proceed{proceed}"
            for gradient_rows in (rows, part):
                parameter, gradient, state = (m(n, *rest) for n in (rows, gradient_rows, part))
                second = m(part, *rest, make=positive)
                a: Attributes = Sgd(0.9, proceed == 0, 0.01, rate=3.0)
                named = f"{note}-{gradient_rows}"
                cases.add("sgd_update_part", a, parameter, gradient, block, state, note=named)
                a = AdamW(weight_decay=0.1, clip_value=0.05 * proceed)
                cases.add("adamw_update_part", a, parameter, gradient, block, state, second, note=named)


def _updates(cases: Cases) -> None:
    sizes = SIZES
    gradients = [m(*size) for size in sizes]
    grown = control(since_growth=1999, updates=1999)
    cases.add("guard", Guard(), control(), m(1), note="loss")
    cases.add("guard", Guard(), control(), m(1, make=_spoiled(np.nan)), note="nan")
    cases.add("guard", Guard(), grown, m(1), *gradients, note="grown")
    cases.add("guard", Guard(), grown, m(1, make=_spoiled(np.inf)), *gradients, note="inf")
    for place in (0, 1, 2, 70):
        spoiled = [m(*size, make=_spoiled(-np.inf)) if i == place else m(*size) for i, size in enumerate(sizes)]
        cases.add("guard", Guard(), grown, m(1), *spoiled, note=f"spoiled{place}")
    # The norm is near 260: one limit that it exceeds, one that it does not; a gradient of several parts.
    large = [*gradients, m(9000), m(4096), m(4097)]
    for limit in (3.0, 1000.0):
        cases.add("guard", Guard(limit), grown, m(1), *large, note=f"norm{limit:g}")
    cases.add("guard", Guard(3.0), control(loss_scale=1024.0), m(1), m(5), note="norm-scaled")
    cases.add("guard", Guard(3.0), grown, m(1), *large[:-1], m(5, make=_spoiled(np.inf)), note="norm-inf")
    cases.add("guard", Guard(0.0, 4), grown, m(1), *gradients[:2], note="accumulated")
    cases.add("guard", Guard(3.0, 4), control(loss_scale=1024.0), m(1), *large, note="norm-accumulated")
    cases.add("check_loss", NONE, control(proceed=0), m(1))
    cases.add("check_loss", NONE, control(), m(1, make=_spoiled(np.inf)), note="inf")
    cases.add("copy_control", NONE, control(loss_scale=1024.0))
    cases.add("guard", Guard(3.0), grown, m(1, make=_spoiled(np.nan)), *gradients[:2], note="norm-nan")
    zero = m(9, make=lambda rng, shape: np.zeros(shape))
    cases.add("lars_ratio", LarsRatio(0.01, 1e-8, 0.1), zero, m(9), control(), note="zero")
    cases.add("lars_ratio", LarsRatio(0.01, 1e-8, 0.1), m(70000), m(70000), control(), note="parts")
    cases.add("lamb_ratio", AdamW(), m(70001), m(70001), control(), m(70001), m(70001, make=positive), note="parts")
    for shape in ((1031,), (16, 3, 3, 3), (3, 40)):
        for proceed in (0, 1):
            block, note = control(proceed=proceed), f"proceed{proceed}"
            cases.add("sgd_update", Sgd(), m(*shape), m(*shape), block, note=f"{note}-plain")
            cases.add("sgd_update", Sgd(0.9, False, 0.01), m(*shape), m(*shape), block, m(*shape), note=note)
            cases.add("sgd_update", Sgd(0.9, True, 0.01), m(*shape), m(*shape), block, m(*shape), note=f"{note}-ahead")
            cases.add("sgd_update", Sgd(0.9, rate=3.0), m(*shape), m(*shape), block, m(*shape), note=f"{note}-rate")
            a = Sgd(0.9, weight_decay=0.01, clip_value=0.05)
            cases.add("sgd_update", a, m(*shape), m(*shape), block, m(*shape), note=f"{note}-clipped")
            cases.add("ema_update", Ema(0.9), m(*shape), m(*shape), block, note=note)
            more = control(accumulated=2 * proceed)
            cases.add("accumulate", NONE, m(*shape), m(*shape), more, note=f"{'more' if proceed else 'first'}")
            first = control(proceed=proceed, updates=1)
            cases.add("ema_update", Ema(0.9), m(*shape), m(*shape), first, note=f"{note}-first")
            ratio = LarsRatio(0.01, 1e-8, 0.1, 0.05)
            cases.add("lars_ratio", ratio, m(*shape), m(*shape), block, note=note)
            a = Sgd(0.9, True, 0.01, rate=3.0)
            cases.add("lars_update", a, m(*shape), m(*shape), block, m(1), m(*shape), note=note)
            a = Sgd(0.0, False, 0.01, clip_value=0.05)
            cases.add("lars_update", a, m(*shape), m(*shape), block, m(1), note=f"{note}-plain")
            second = m(*shape, make=positive)
            a = AdamW(eps=1e-6, weight_decay=0.1, rate=3.0, clip_value=0.05)
            cases.add("lamb_ratio", a, m(*shape), m(*shape), block, m(*shape), second, note=note)
            cases.add("lamb_update", a, m(*shape), block, m(*shape), second, m(1), note=note)
            a = AdamW(clip_value=0.05)
            cases.add("adamw_update", a, m(*shape), m(*shape), block, m(*shape), second, note=f"{note}-clipped")
            for rate in (1.0, 3.0):
                a, named = AdamW(weight_decay=0.1, rate=rate), note if rate == 1 else f"{note}-rate"
                cases.add("adamw_update", a, m(*shape), m(*shape), block, m(*shape), second, note=named)


# rows, channels, size, filters, kernel, stride, pad, dilation, groups
CONVOLUTIONS = (
    (2, 3, (9, 8), 16, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (3, 16, (7, 7), 70, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (2, 5, (11, 9), 9, (3, 2), (2, 3), (2, 1, 0, 1), (2, 1), 1),
    (2, 24, (6, 7), 16, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 2),
    (3, 19, (8, 7), 19, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 19),
    (2, 6, (9, 9), 12, (5, 5), (2, 2), (2, 2, 2, 2), (1, 1), 6),
    (3, 4, (41, 40), 9, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (3, 10, (43, 40), 10, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 10),
    (1, 2, (1, 1), 3, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    # Depthwise: more channels than a block has, both strides, uneven padding, several filters a channel, sums in parts.
    (2, 136, (7, 9), 136, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 136),
    (2, 12, (15, 14), 12, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 12),
    (3, 8, (10, 13), 8, (3, 3), (2, 2), (0, 1, 0, 1), (1, 1), 8),
    (2, 4, (6, 5), 4, (3, 3), (1, 1), (3, 0, 2, 4), (1, 1), 4),
    (2, 5, (9, 10), 10, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 5),
    (2, 4, (8, 8), 12, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 4),
    (3, 7, (1, 2), 7, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 7),
    (3, 128, (14, 13), 128, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 128),
    (2, 4, (92, 90), 4, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 4),
    (2, 8, (6, 7), 8, (3, 3), (1, 1), (2, 2, 2, 2), (2, 2), 8),
    # Few channels: several blocks across; pixels at odd elements; one channel; filters for several grids; lines of
    # whole vectors, in several tiles a block.
    (2, 3, (21, 140), 64, (7, 7), (2, 2), (3, 3, 3, 3), (1, 1), 1),
    (2, 3, (9, 11), 32, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (2, 3, (11, 70), 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (1, 1, (12, 70), 32, (5, 5), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (2, 4, (10, 9), 96, (3, 3), (2, 2), (0, 1, 1, 0), (1, 1), 1),
    (1, 3, (35, 43), 64, (11, 11), (4, 4), (2, 2, 2, 2), (1, 1), 1),
    (1, 3, (12, 20), 32, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1), 1),
    (2, 3, (19, 136), 64, (7, 7), (2, 2), (3, 3, 3, 3), (1, 1), 1),
    # Bands of eight rows and of one in turn: of whole vectors and not; several a block where there are many images.
    (4, 3, (33, 8), 32, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (4, 3, (33, 7), 32, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (180, 3, (33, 8), 32, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (180, 3, (33, 7), 32, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    # A warp a tap: several tiles across and down, and pairs of blocks of channels; uneven padding.
    (2, 64, (17, 35), 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (1, 128, (3, 7), 64, (3, 3), (1, 1), (0, 2, 1, 0), (1, 1), 1),
    # Channels by the 64 and 128: several blocks of pixels, steps, filter taps in one tile.
    (3, 64, (9, 11), 128, (1, 3), (1, 2), (0, 0, 1, 1), (1, 1), 1),
    (2, 192, (5, 6), 128, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    # Lines that are too long for a patch of whole lines; a filter of one column.
    (2, 64, (5, 66), 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (2, 64, (6, 5), 128, (5, 1), (1, 1), (2, 1, 0, 0), (1, 1), 1),
    (1, 128, (5, 66), 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    # Lines of several images in a stage: with padding and without, uneven, and more of it than the filter sees.
    (3, 64, (6, 14), 128, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (2, 128, (5, 8), 192, (2, 3), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (4, 64, (3, 5), 128, (3, 3), (1, 1), (2, 1, 0, 2), (1, 1), 1),
    (5, 64, (2, 1), 64, (1, 3), (1, 1), (0, 0, 4, 3), (1, 1), 1),
    # Few filters: every number, for each is compiled by itself; channels that idle threads, one pixel, blocks across.
    (2, 64, (23, 31), 2, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (3, 24, (7, 5), 1, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (1, 8, (9, 11), 3, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (2, 72, (13, 10), 8, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (5, 296, (3, 3), 4, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (3, 64, (1, 1), 7, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (1, 40, (5, 9), 5, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (2, 16, (9, 4), 6, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    # Windows side by side: one for one pixel; images of odd sizes, several tiles of pixels and of columns; weights of a
    # block that stay, and that come again; other filters; pixels that no window sees; and a volume with
    # two taps among 64 columns.
    (2, 32, (4, 10, 6), 64, (2, 2, 2), (2, 2, 2), (0,) * 6, (1, 1, 1), 1),
    (1, 64, (2, 2), 64, (2, 2), (2, 2), (0, 0, 0, 0), (1, 1), 1),
    (3, 64, (18, 26), 128, (2, 2), (2, 2), (0, 0, 0, 0), (1, 1), 1),
    (1, 128, (22, 26), 192, (2, 2), (2, 2), (0, 0, 0, 0), (1, 1), 1),
    (1, 64, (12, 9), 384, (4, 1), (4, 1), (0, 0, 0, 0), (1, 1), 1),
    (2, 256, (3, 9), 64, (1, 3), (1, 3), (0, 0, 0, 0), (1, 1), 1),
    (2, 64, (5, 7), 64, (2, 2), (2, 2), (0, 0, 0, 0), (1, 1), 1),
    # One place: more filters than a block makes, fewer, two pixels, many channels, and parts of 64.
    (3, 64, (9, 11), 320, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (2, 128, (5, 13), 256, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (1, 256, (1, 2), 64, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (1, 256, (9, 17), 192, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (2, 168, (5, 9), 24, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (1, 512, (7, 13), 128, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    # Few channels and filters by the 16.
    (2, 3, (17, 70), 16, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 1),
    (2, 3, (11, 13), 48, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    # Depthwise filters larger than 3 x 3: more channels than a block has, several tiles, fewer pixels than one; both
    # strides; padding that is uneven, wider than the filter, and none; sums in parts; several filters a channel.
    (2, 6, (9, 16), 6, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1), 6),
    (2, 70, (5, 3), 70, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1), 70),
    (2, 4, (11, 13), 4, (5, 5), (2, 2), (2, 2, 2, 2), (1, 1), 4),
    (2, 6, (10, 12), 6, (5, 5), (2, 2), (1, 2, 1, 2), (1, 1), 6),
    (1, 2, (6, 5), 2, (5, 5), (1, 1), (6, 0, 0, 7), (1, 1), 2),
    (5, 16, (20, 21), 16, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1), 16),
    (1, 2, (7, 6), 4, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1), 2),
    (2, 6, (8, 15), 6, (7, 7), (1, 1), (3, 3, 3, 3), (1, 1), 6),
    (2, 68, (7, 7), 68, (7, 7), (1, 1), (3, 3, 3, 3), (1, 1), 68),
    (1, 34, (9, 9), 34, (7, 7), (1, 1), (0, 0, 0, 0), (1, 1), 34),
    (2, 4, (13, 14), 4, (7, 7), (2, 2), (3, 3, 3, 3), (1, 1), 4),
    (2, 4, (12, 11), 4, (7, 7), (2, 2), (2, 3, 3, 2), (1, 1), 4),
    (1, 2, (2, 1), 2, (7, 7), (2, 2), (3, 3, 8, 3), (1, 1), 2),
    (3, 4, (40, 41), 4, (7, 7), (1, 1), (3, 3, 3, 3), (1, 1), 4),
    (2, 10, (9, 16), 10, (1, 11), (1, 1), (0, 0, 5, 5), (1, 1), 10),
    (2, 10, (16, 9), 10, (11, 1), (1, 1), (5, 5, 0, 0), (1, 1), 10),
    (2, 4, (6, 15), 4, (1, 9), (2, 2), (1, 0, 4, 3), (1, 1), 4),
    (2, 4, (15, 6), 4, (8, 1), (2, 2), (4, 3, 0, 1), (1, 1), 4),
    (2, 4, (5, 9), 4, (1, 2), (1, 1), (0, 0, 1, 0), (1, 1), 4),
    (4, 16, (20, 33), 16, (1, 7), (1, 1), (0, 0, 3, 3), (1, 1), 16),
    (4, 16, (33, 20), 16, (7, 1), (1, 1), (3, 3, 0, 0), (1, 1), 16),
    # Few channels and lines of whole vectors, filters by the 64: pixels at odd elements in two tiles across, one
    # channel and an odd number of vectors in a window, uneven padding and strides, rows of windows of one element more
    # than whole vectors, fewer columns than a tile's.
    (2, 3, (11, 72), 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (1, 1, (12, 136), 64, (5, 5), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (2, 4, (10, 10), 128, (3, 3), (2, 1), (0, 1, 1, 0), (1, 1), 1),
    (3, 3, (9, 16), 64, (2, 3), (2, 1), (1, 0, 0, 2), (1, 1), 1),
    (1, 7, (13, 24), 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (140, 3, (33, 8), 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    # Three planes under a filter: tiles whose borders lie inside, several segments of planes, blocks of filters, planes
    # that only padding completes, uneven padding, images, and volumes that are many images.
    (1, 32, (3, 5, 9), 32, (3, 3, 3), (1, 1, 1), (1, 1, 1, 1, 1, 1), (1, 1, 1), 1),
    (1, 32, (2, 17, 9), 64, (3, 3, 3), (1, 1, 1), (1, 1, 1, 1, 1, 1), (1, 1, 1), 1),
    (1, 64, (2, 3, 7), 32, (3, 3, 3), (1, 1, 1), (1, 1, 1, 1, 1, 1), (1, 1, 1), 1),
    (1, 64, (4, 2, 3), 64, (3, 3, 3), (1, 1, 1), (2, 0, 0, 2, 1, 0), (1, 1, 1), 1),
    (1, 48, (1, 4, 9), 96, (3, 3, 3), (1, 1, 1), (2, 2, 1, 0, 1, 1), (1, 1, 1), 1),
    (2, 48, (5, 3, 2), 48, (3, 3, 3), (1, 1, 1), (0, 0, 0, 0, 0, 1), (1, 1, 1), 1),
    (1, 32, (7, 131), 48, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (2, 64, (3, 130), 32, (3, 3), (1, 1), (0, 2, 1, 1), (1, 1), 1),
    (1, 64, (2, 4, 5), 48, (1, 3, 3), (1, 1, 1), (0, 0, 1, 1, 1, 1), (1, 1, 1), 1),
    # Volumes: uneven padding, strides and dilation, groups of tiles, depthwise, a filter gradient in parts.
    (2, 3, (4, 5, 6), 4, (2, 3, 1), (1, 2, 1), (1, 0, 2, 1, 0, 0), (2, 1, 1), 1),
    (2, 18, (3, 4, 5), 18, (3, 2, 2), (2, 1, 2), (1, 1, 0, 1, 1, 0), (1, 2, 1), 2),
    (2, 4, (3, 5, 4), 8, (3, 3, 3), (1, 1, 1), (1, 1, 1, 1, 1, 1), (1, 1, 1), 4),
    (1, 2, (13, 18, 19), 2, (2, 1, 2), (1, 1, 1), (0, 1, 0, 0, 0, 1), (1, 1, 1), 1),
    # Volumes of few channels: bands of all planes under a window, at the first and the last plane; two tiles across;
    # lines of whole vectors; strides and uneven padding; filters by the 16, and a window of one plane.
    (2, 1, (3, 11, 13), 32, (3, 3, 3), (1, 1, 1), (1, 1, 1, 1, 1, 1), (1, 1, 1), 1),
    (1, 1, (2, 9, 72), 32, (3, 3, 3), (1, 1, 1), (1, 1, 1, 1, 1, 1), (1, 1, 1), 1),
    (1, 4, (5, 6, 10), 64, (3, 3, 3), (2, 2, 2), (1, 0, 0, 1, 1, 1), (1, 1, 1), 1),
    (1, 2, (4, 4, 9), 16, (1, 3, 3), (1, 1, 1), (0, 0, 1, 1, 1, 1), (1, 1, 1), 1),
    (1, 3, (1, 3, 4), 32, (5, 2, 3), (1, 1, 1), (2, 2, 1, 0, 1, 1), (1, 1, 1), 1),
    # Volumes of few channels that sweep planes: every number of channels; tiles whose borders lie inside, several of
    # them in both directions; planes that only padding completes; blocks of filters; uneven padding and none.
    (2, 2, (6, 18, 33), 16, (3, 3, 3), (1, 1, 1), (1, 1, 1, 1, 1, 1), (1, 1, 1), 1),
    (1, 3, (1, 4, 35), 48, (3, 3, 3), (1, 1, 1), (2, 2, 1, 0, 0, 0), (1, 1, 1), 1),
    (2, 4, (4, 5, 7), 64, (3, 3, 3), (1, 1, 1), (0, 1, 2, 1, 0, 2), (1, 1, 1), 1),
)


def _products(cases: Cases) -> None:
    for number, (rows, channels, size, filters, kernel, stride, pad, dilation, groups) in enumerate(CONVOLUTIONS):
        a = Convolution(size, kernel, stride, pad, dilation, groups)
        x = w(rows, channels, *size)
        weight, y = w(filters, channels // groups, *kernel), w(rows, filters, *a.output_size)
        cases.add("convolution", a, x, weight, note=f"{number}")
        cases.add("convolution_backward_data", a, y, weight, note=f"{number}")
        cases.add("convolution_backward_filter", a, x, y, note=f"{number}")
    for rows, shape, outputs in (
        (5, (7,), 3),
        (70, (4, 3, 5), 65),
        (1, (130,), 1),
        (70, (4, 3, 12), 200),
        (9, (36,), 132),
    ):
        a = Linear(shape)
        weight = w(outputs, a.features_in)
        cases.add("linear", a, w(rows, *shape), weight)
        cases.add("linear_backward_data", a, w(rows, outputs), weight)
        cases.add("linear_backward_filter", a, w(rows, *shape), w(rows, outputs))


def _matmuls(cases: Cases) -> None:
    for outer, (m, n, k) in (((2, 3), (5, 7, 9)), ((3,), (70, 66, 40)), ((2, 1), (1, 3, 130))):
        for a in (Matmul(), Matmul(True, False), Matmul(False, True), Matmul(True, True)):
            left = (*outer, k, m) if a.transpose_a else (*outer, m, k)
            right = (*outer, n, k) if a.transpose_b else (*outer, k, n)
            cases.add("matmul", a, w(*left), w(*right), note=f"{m}x{n}x{k}{'ta' * a.transpose_a}{'tb' * a.transpose_b}")


def _windows(cases: Cases) -> None:
    for heads, a in (
        (3, WindowBias((3, 4))),
        (1, WindowBias((1, 5), (2, 3), (0, 2))),
        (2, WindowBias((4, 3), (2, 2), (2, 1))),
    ):
        table, windows = w(a.offsets, heads), a.grid[0] * a.grid[1]
        cases.add("window_bias", a, table)
        cases.add("window_bias_backward", a, w(heads, 1, windows, a.pixels, a.pixels))
    for shape, shift in (((2, 16, 5, 6), (2, -3)), ((3, 3, 4, 7), (-1, 0)), ((2, 8, 3, 8), (0, 5))):
        back = (0, -shift[0], -shift[1])
        cases.add("pad", Pad("wrap", shape[1:], (0, *shift), back), w(*shape), note="wrap")


def _attention(cases: Cases) -> None:
    """Add cases of attention with different heads, groups, queries, keys, channels of a head, and biases."""
    for heads, groups, queries, keys, depth, bias, packed, causal in (
        (2, 1, 70, 70, 32, None, True, False), (2, 3, 19, 19, 8, (2, 3), True, False),
        (3, 2, 9, 21, 40, (1, 2), False, False), (2, 2, 21, 9, 24, (2, 1), False, True),
        (1, 1, 35, 67, 80, (1, 1), False, True), (1, 1, 5, 66, 120, None, False, False),
        (3, 0, 17, 17, 5, None, True, True), (1, 1, 3, 18, 200, (1, 1), False, False),
        (2, 1, 1, 1, 16, None, True, False), (1, 1, 5, 5, 64, None, True, False),
        (1, 4, 49, 49, 32, (1, 4), True, False), (1, 1, 50, 50, 64, (1, 1), True, True),
        (1, 1, 33, 80, 56, (1, 1), False, False), (1, 1, 196, 196, 32, None, True, True),
        (1, 1, 197, 197, 64, None, True, False),
    ):  # fmt: skip
        outer = (groups,) if groups else ()
        channels = heads * depth
        q, k = w(2, channels, *outer, queries), w(2, channels, *outer, keys)
        operands = (w(2, 3 * channels, *outer, queries),) if packed else (q, k, k)
        note = f"{heads}x{depth}-{keys}{'-packed' * packed}{'-causal' * causal}"
        added = () if bias is None else (w(bias[0], 1, bias[1], queries, keys),)
        a = Attention(heads, depth**-0.5, causal, packed)
        cases.add("attention", a, *operands, *added, note=note)
        read = (*operands, *added, q, q, m(2, 1, heads, *outer, queries, make=positive))
        cases.add("attention_backward", a, *read, note=note)
        if added:
            cases.add("attention_backward_bias", a, *read, note=note)


_FAMILIES = (
    _elementwise, _channels, _filters, _groups, _pools, _adaptive, _images, _moves, _augment, _losses, _parts, _updates,
    _products, _matmuls, _attention, _windows,
)  # fmt: skip


def _all() -> tuple[Case, ...]:
    cases = Cases()
    for family in _FAMILIES:
        family(cases)
    return tuple(cases.cases)


IN_FILES = {kernel.kind for kernel in KERNELS.values() if kernel.file}
ALL = _all()
# Of operations whose kernels are generated: `test_generated` runs them.
GENERATED = tuple(c for c in ALL if c.kind not in IN_FILES and KINDS[c.kind].device is not None)
CASES = tuple(c for c in ALL if c.kind in IN_FILES or KINDS[c.kind].device is None)


def _with_statistics() -> Iterable[Case]:
    """Yield convolutions that also compute the statistics of their rounded result."""
    for case in CASES:
        if case.kind == "convolution" and isinstance(case.attributes, Convolution):
            for statistics in ("batch_statistics", "instance_statistics"):
                group = grouped(case.attributes, statistics)
                variant = Case(f"{case.name}-{statistics}", group.kind, group.attributes, case.operands)
                if any(k.takes(variant.request(Precision.BF16)) for k in KERNELS.values() if k.kind == variant.kind):
                    yield variant


STATISTICS = tuple(_with_statistics())
