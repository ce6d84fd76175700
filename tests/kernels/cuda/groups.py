"""Every launch of every pattern as a case: the fused launch against its single operations in float64.

Patterns that begin with a product need operands of their own. A convolution with statistics is not a kernel of mbc's
own; tests/gpu tests it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import Precision
from mbc.kernels.cuda import KERNELS
from mbc.ops import KINDS
from mbc.ops.activation import LeakyRelu
from mbc.ops.arithmetic import Broadcast
from mbc.ops.base import NoAttributes
from mbc.ops.batch_normalize import BatchNormalize, BatchNormalizeBackward, UpdateRunning
from mbc.ops.convolution import Convolution
from mbc.ops.fused import join
from mbc.ops.group_norm import LayerNorm
from mbc.ops.instance_norm import InstanceNormalize, InstanceNormalizeBackward
from mbc.ops.layerwise import LarsRatio
from mbc.ops.matrix import Cast
from mbc.ops.pooling import AveragePool, MaxPool
from mbc.ops.reduce import Reduce
from mbc.ops.shape import ChannelSlice
from mbc.ops.update import AdamW, Ema, Sgd
from mbc.optimize.fusion.catalogue import PATTERNS, RELU_FUSED_REMAT
from mbc.optimize.fusion.catalogue_conv1x1 import (
    CONVOLUTION_FUSED_REMAT,
    DATA_GRADIENT_FUSED_REMAT,
    DATA_GRADIENT_IN_PARTS,
    DATA_GRADIENT_NORM_REDUCTIONS,
    DATA_GRADIENT_REDUCTIONS,
    NARROW_HEADS,
    NORMS_IN_PROLOGUES,
    PAIR_FUSED_REMAT,
    PAIR_REDUCTIONS,
    REMAT_INSIDE,
    REMAT_INSIDE_REDUCTIONS,
)
from mbc.optimize.fusion.pattern import LaunchPattern, Pattern, Statement
from tests.kernels.cuda.cases import LONG, SHAPES, Case, Operand, Shape, bytes_below, control, m, positive, w

EPS = 1e-3
SAME = frozenset({"x", "x2", "y", "z", "z2", "s", "r", "d", "dy", "do", "dx", "a", "b"})  # of the shape of the image
POOLED = frozenset({"p", "dp"})
PARTS = frozenset({"left", "right"})  # of one with the channels of the image
_START, _BEHIND = 8, 16  # channels before and after a slice: vectors stay whole if the slice has whole vectors

# Kernel, stride, pad: the sizes that kernels know, and others.
Window = tuple[tuple[int, int], tuple[int, int], tuple[int, int, int, int]]
WINDOWS: tuple[Window, ...] = (
    ((3, 3), (2, 2), (1, 1, 1, 1)),
    ((3, 3), (2, 2), (2, 0, 0, 1)),
    ((2, 2), (2, 2), (0, 0, 0, 0)),
    ((2, 2), (2, 2), (1, 0, 1, 1)),
    ((3, 3), (1, 1), (1, 1, 1, 1)),
    ((3, 2), (2, 1), (1, 0, 0, 1)),
    ((1, 1), (2, 3), (0, 0, 0, 0)),
)


# Channels whose vectors no two blocks share evenly.
SIGNED: tuple[Shape, ...] = ((2, 136, 3, 5), (1, 24, 7, 3))


def _attributes(statement: Statement, shape: Shape, window: Window) -> Attributes:
    if statement.kind in ("batch_normalize", "batch_normalize_backward_reduce"):
        return BatchNormalize(EPS)
    if statement.kind in ("instance_normalize", "instance_normalize_backward_reduce"):
        return InstanceNormalize(EPS)
    if statement.kind.startswith("leaky_relu"):
        return LeakyRelu(0.1)
    if statement.kind == "batch_normalize_backward":
        count = 1
        for size in (shape[0], *shape[2:]):
            count *= size
        return BatchNormalizeBackward(EPS, count)
    if statement.kind == "layer_norm_backward":
        return LayerNorm(EPS)
    if statement.kind == "avg_pool_backward":
        return AveragePool((shape[2], shape[3]), (shape[2], shape[3]), (1, 1))
    if statement.kind == "broadcast":
        return Broadcast("mul", 1)
    if statement.kind == "row_reduce_dot":
        return Reduce(tuple(range(2, len(shape))), shape[1:2])
    if statement.kind.startswith("max_pool"):
        return _pool(shape, window, index=len(statement.outputs) == 2 or statement.kind != "max_pool")
    if statement.kind == "channel_slice":
        left = _left(shape)
        return ChannelSlice(_START, shape[1]) if statement.inputs == ("wide",) else ChannelSlice(left, shape[1] - left)
    return NoAttributes()


def _pool(shape: Shape, window: Window, index: bool = False) -> MaxPool:
    return MaxPool((shape[2], shape[3]), *window, index=index)


def _pools(statements: Iterable[Statement]) -> bool:
    return any(statement.kind.startswith("max_pool") for statement in statements)


def _operation(number: int, statement: Statement, shape: Shape, affine: bool, window: Window) -> Operation:
    inputs = tuple(name for name in statement.inputs if affine or name not in statement.optional)
    return Operation(f"op{number}", statement.kind, inputs, statement.outputs, _attributes(statement, shape, window))


def group(pattern: Pattern, part: LaunchPattern, shape: Shape, affine: bool, window: Window = WINDOWS[0]) -> Operation:
    return join([_operation(n, pattern.statements[n], shape, affine, window) for n in part.statements], part.writes)


def _operand(name: str, shape: Shape, window: Window) -> Operand:
    if name in POOLED:
        return w(*shape[:2], *_pool(shape, window).output_size)
    if name == "wide":
        return w(shape[0], _START + shape[1] + _BEHIND, *shape[2:])
    if name == "index":
        positions = window[0][0] * window[0][1]
        return Operand("uint8", (*shape[:2], *_pool(shape, window).output_size), bytes_below(positions))
    if normalised := re.fullmatch(r"(\D+)([3-6])", name):  # a part of several, of its own size
        channels = shape[1] + 8 * (int(normalised[2]) - 3)
        return w(shape[0], channels, *shape[2:]) if normalised[1] == "x" else m(channels, make=positive)
    if name == "mask":
        return Operand("uint8", (shape[0], shape[1] // 8, *shape[2:]), bytes_below(256))
    if name.startswith("pixel_"):  # a number for each pixel of each image
        return m(shape[0], 1, *shape[2:], make=positive)
    if name in ("gate", "ds"):
        return w(*shape[:2], *(1,) * (len(shape) - 2))
    if name == "scale":
        return w(shape[1])
    if name in PARTS:
        left = _left(shape)
        return w(shape[0], left if name == "left" else shape[1] - left, *shape[2:])
    return w(*shape) if name in SAME else m(shape[1], make=positive)


def _left(shape: Shape) -> int:
    """Return the channels of the first of two parts: about half, in whole vectors if there are enough."""
    return max(1, shape[1] // 16 * 8)


def _fits(shape: Shape, window: Window, number: int) -> bool:
    """Return whether the image fits the window. Large images, which take long, use two of the windows only."""
    kernel, _, (top, bottom, left, right) = window
    inside = kernel[0] <= shape[2] + top + bottom and kernel[1] <= shape[3] + left + right
    return inside and (shape not in LONG or number in (0, 2))


def _cases() -> Iterable[Case]:
    for pattern in (*PATTERNS, *RELU_FUSED_REMAT):
        if any(KINDS[statement.kind].flops for statement in pattern.statements):
            continue
        shapes = [*SHAPES, *LONG]
        pools = _pools(pattern.statements)
        if any({"left", "part"} & {*statement.inputs, *statement.outputs} for statement in pattern.statements):
            shapes = [shape for shape in shapes if shape[1] > 1]
        if any("mask" in {*statement.inputs, *statement.outputs} for statement in pattern.statements):
            shapes = [shape for shape in (*shapes, *SIGNED) if shape[1] % 8 == 0]
        if pools or any(statement.kind == "avg_pool_backward" for statement in pattern.statements):
            shapes = [shape for shape in shapes if len(shape) == 4]
        optional = any(statement.optional for statement in pattern.statements)
        for part in pattern.launches:
            for affine in (True, False) if optional else (True,):
                for shape in shapes:
                    for number, window in enumerate(WINDOWS if pools else WINDOWS[:1]):
                        if pools and not _fits(shape, window, number):
                            continue
                        joined = group(pattern, part, shape, affine, window)
                        operands = tuple(_operand(name, shape, window) for name in joined.inputs)
                        note = ("" if affine else "-plain") + (f"-window{number}" if number else "")
                        name = f"{joined.kind}{note}-{'.'.join(part.writes)}-{'x'.join(map(str, shape))}"
                        yield Case(name, joined.kind, joined.attributes, operands)


def _together(kind: str, attributes: Sequence[Attributes], operands: Sequence[Sequence[Operand]]) -> Case:
    """Return a case of several operations of one kind. An `Operand` object that occurs twice is one value."""
    names: dict[int, str] = {}
    by_name: dict[str, Operand] = {}
    operations: list[Operation] = []
    for number, (a, own) in enumerate(zip(attributes, operands, strict=True)):
        for operand in own:
            by_name.setdefault(names.setdefault(id(operand), f"v{len(names)}"), operand)
        outputs = len(KINDS[kind].shape(a, tuple(operand.type(Precision.FP32) for operand in own)))
        inputs = tuple(names[id(operand)] for operand in own)
        results = tuple(f"out{number}.{o}" for o in range(outputs))
        operations.append(Operation(f"op{number}", kind, inputs, results, a))
    joined = join(operations, [name for operation in operations for name in operation.outputs])
    name = f"{joined.kind}-{len(operations)}-{len(joined.inputs)}-{attributes[0]}"
    return Case(name, joined.kind, joined.attributes, tuple(by_name[v] for v in joined.inputs))


# Of a transposed convolution: rows, channels in and out, the smaller image, the filter; channels of the other part.
UPS: tuple[tuple[int, int, int, tuple[int, ...], tuple[int, ...], int], ...] = (
    (1, 64, 64, (1, 1), (2, 2), 64),
    (3, 128, 64, (9, 13), (2, 2), 64),
    (1, 192, 128, (11, 13), (2, 2), 8),
    (2, 64, 128, (3, 5), (3, 2), 200),
    (2, 64, 32, (3, 5, 9), (2, 2, 2), 24),
    (1, 128, 64, (2, 3, 4), (3, 2, 2), 8),
)


def _ups() -> Iterable[Case]:
    """Yield cases of a transposed convolution, its bias, and a concatenation with the result first or last."""
    for rows, filters, channels, small, kernel, others in UPS:
        size = tuple(extent * k for extent, k in zip(small, kernel, strict=True))
        operands = {
            "a": w(rows, filters, *small),
            "w": w(filters, channels, *kernel),
            "bias": m(channels),
            "r": w(rows, others, *size),
        }
        product = Convolution(size, kernel, kernel)
        for pattern in PATTERNS:
            if pattern.statements[0].kind != "convolution_backward_data" or pattern.statements[-1].kind != "concat":
                continue
            members = [
                Operation(f"op{n}", s.kind, s.inputs, s.outputs, NoAttributes() if n else product)
                for n, s in enumerate(pattern.statements)
            ]
            joined = join(members, pattern.launches[0].writes)
            shape = "x".join(map(str, (rows, filters, *small)))
            name = f"{joined.kind}-{'.'.join(pattern.statements[-1].inputs)}-{shape}-{others}"
            yield Case(name, joined.kind, joined.attributes, tuple(operands[v] for v in joined.inputs))


# Of a pointwise convolution: rows, channels, size, filters; of its data gradient the other way round.
Sizes = tuple[int, int, tuple[int, int], int]
POINTS: tuple[Sizes, ...] = (
    (3, 64, (9, 11), 320),
    (2, 128, (5, 13), 256),
    (1, 128, (1, 2), 64),
    (2, 24, (5, 9), 136),
    (1, 104, (6, 11), 48),
    (1, 128, (1, 2), 128),
    (1, 256, (7, 19), 128),
)
# For launches that run the GEMM of others: beside it, sizes only decide how much of the last tile is empty.
BEHIND_POINTS = (POINTS[1], POINTS[-1])
GRADIENT_POINTS: tuple[Sizes, ...] = ((2, 24, (5, 9), 136), (1, 232, (7, 19), 128))
# Of two products: channels of the first one, of which the second has more. At the last there is room for four stages of
# pixels, and for one tile beside where two values are read for sums.
PAIR_POINTS: tuple[Sizes, ...] = ((2, 24, (5, 9), 136), (1, 200, (7, 19), 256))
MORE_CHANNELS = 40


def _reads_masks(pattern: Pattern) -> bool:
    kinds = {statement.kind for statement in pattern.statements}
    return "relu_backward_masked" in kinds and "relu_mask" not in kinds


# Signs are read 128 filters at once.
POINT_FORMS = tuple(
    (pattern, part, sizes)
    for patterns, all_sizes in (
        (CONVOLUTION_FUSED_REMAT[:1], POINTS),
        (CONVOLUTION_FUSED_REMAT[1:], BEHIND_POINTS),
        ((*DATA_GRADIENT_REDUCTIONS, *DATA_GRADIENT_FUSED_REMAT), GRADIENT_POINTS),
        (DATA_GRADIENT_NORM_REDUCTIONS[:1], GRADIENT_POINTS),
        (REMAT_INSIDE_REDUCTIONS, POINTS[1:2]),
        ((*PAIR_REDUCTIONS, *PAIR_FUSED_REMAT), PAIR_POINTS),
        ((*REMAT_INSIDE[:2], REMAT_INSIDE[-1]), POINTS[:1]),
    )
    for pattern in patterns
    for part in pattern.launches
    if 0 in part.statements
    for sizes in all_sizes
    if sizes[-1] % 128 == 0 or not _reads_masks(pattern)
)


def points(pattern: Pattern, part: LaunchPattern, sizes: Sizes, affine: bool = True) -> Operation:
    """Return the launch of some operations of a pattern; a single operation is returned as it is."""
    rows, _, size, filters = sizes
    members = [
        _operation(n, pattern.statements[n], (rows, filters, *size), affine, WINDOWS[0]) for n in part.statements
    ]
    members = [replace(o, attributes=Convolution(size, (1, 1))) if KINDS[o.kind].flops else o for o in members]
    return join(members, part.writes) if len(members) > 1 else members[0]


def point_operand(name: str, pattern: Pattern, sizes: Sizes) -> Operand:
    rows, channels, size, filters = sizes
    for product in (statement for statement in pattern.statements if KINDS[statement.kind].flops):
        read, weight = product.inputs
        if name == weight:
            forward = product.kind == "convolution"
            return w(*((filters, channels) if forward else (channels, filters)), 1, 1)
        if name == read:
            return w(rows, channels, *size)
        channels += MORE_CHANNELS
    return _operand(name, (rows, filters, *size), WINDOWS[0])


def _points() -> Iterable[Case]:
    for pattern, part, sizes in POINT_FORMS:
        if sizes not in (*POINTS[:3], GRADIENT_POINTS[-1], PAIR_POINTS[-1]):  # the others by `test_pointwise`
            continue
        for affine in (True, False) if any(pattern.statements[n].optional for n in part.statements) else (True,):
            joined = points(pattern, part, sizes, affine)
            name = f"{joined.kind}-{'.'.join(joined.outputs)}-{'x'.join(map(str, sizes))}{'' if affine else '-plain'}"
            operands = tuple(point_operand(v, pattern, sizes) for v in joined.inputs)
            yield Case(name, joined.kind, joined.attributes, operands)


# Of a data gradient that sweeps planes: rows, channels of the gradient that is read and of the result, size.
SWEPT: tuple[tuple[int, int, int, tuple[int, ...]], ...] = (
    (2, 32, 48, (3, 5, 9)),
    (1, 64, 64, (4, 17, 2)),
    (3, 48, 64, (2, 131)),
)


# Of a last layer behind a norm: rows, filters, channels, size. More pixels than a warp shares, and than a part has.
HEADS: tuple[tuple[int, int, int, tuple[int, ...]], ...] = (
    (2, 2, 64, (5, 9)),
    (3, 3, 32, (4, 17, 8)),
    (1, 4, 24, (1, 2)),
    (2, 1, 264, (33, 8)),
)


# Of a convolution behind a norm, and of its filter gradient: rows, filters, channels, size. A block has many samples.
BEHIND: tuple[tuple[int, int, int, tuple[int, ...]], ...] = (
    (2, 48, 32, (3, 5, 9)), (3, 32, 32, (2, 4, 3)), (3, 32, 64, (5, 17, 2)), (3, 64, 32, (2, 131)), (2, 64, 48, (5, 3)),
)  # fmt: skip
BEHIND_IN_PLANES = ((3, 32, 32, (3, 2, 5)),)  # with filters of one plane, so that a sample is several images


def _beside_norms() -> Iterable[Case]:
    """Yield data gradients with the sums of a norm's gradient, and every launch of convolutions behind norms."""
    swept = ((pattern, pattern.launches[:1], SWEPT, (3, 3, 3)) for pattern in DATA_GRADIENT_NORM_REDUCTIONS)
    heads = ((pattern, pattern.launches, HEADS, (1, 1, 1)) for pattern in NARROW_HEADS)
    behind = (
        (pattern, pattern.launches, shapes, window)
        for pattern in NORMS_IN_PROLOGUES[1::2]
        for shapes, window in ((BEHIND, (3, 3, 3)), (BEHIND_IN_PLANES, (1, 3, 3)))
    )
    for pattern, parts, shapes, window in (*swept, *heads, *behind):
        for part, (rows, others, channels, size), affine in itertools.product(parts, shapes, (True, False)):
            shape, kernel = (rows, channels, *size), window[-len(size) :]
            own = {"instance_normalize_backward": InstanceNormalizeBackward(EPS, math.prod(size))}
            product = Convolution(size, kernel, pad=tuple(taps // 2 for taps in kernel for _ in range(2)))
            members = [_operation(n, pattern.statements[n], shape, affine, WINDOWS[0]) for n in part.statements]
            attributes = (product if KINDS[o.kind].flops else own.get(o.kind, o.attributes) for o in members)
            joined = join([replace(o, attributes=a) for o, a in zip(members, attributes, strict=True)], part.writes)
            of_samples = (rows, channels, *(1,) * len(size)) if "instance" in joined.kind else (channels,)
            operands = {
                "g": w(rows, others, *size),
                "w": w(others, channels, *product.kernel),
                "bias": m(others),
                **{name: m(*of_samples, make=positive) for name in ("mean", "variance", "dgamma", "dbeta")},
            }
            name = f"{joined.kind}-{'x'.join(map(str, shape))}-{others}{'' if affine else '-plain'}"
            all_operands = tuple(operands.get(v) or _operand(v, shape, WINDOWS[0]) for v in joined.inputs)
            yield Case(name, joined.kind, joined.attributes, all_operands)


def _in_halves() -> Iterable[Case]:
    """Yield the gradients of concatenations of two values of one size, in either order."""
    pattern = DATA_GRADIENT_IN_PARTS
    for (rows, channels, filters, size), second in itertools.product(
        ((2, 32, 64, (3, 5, 9)), (1, 48, 96, (2, 131))), (0, 1)
    ):
        members = [_operation(n, s, (rows, filters, *size), True, WINDOWS[0]) for n, s in enumerate(pattern.statements)]
        product = Convolution(size, (3,) * len(size), pad=(1, 1) * len(size))
        slices = [ChannelSlice(filters // 2 * start, filters // 2) for start in (second, 1 - second)]
        parts = [replace(o, attributes=a) for o, a in zip(members, (product, *slices), strict=True)]
        joined = join(parts, pattern.launches[0].writes)
        operands = w(rows, channels, *size), w(channels, filters, *product.kernel)
        yield Case(f"{joined.kind}-{second}-{rows}x{filters}x{size}", joined.kind, joined.attributes, operands)


# More than one launch takes, sizes around those of vectors, chunks and blocks.
SIZES = (1, 2, 3, 5, 4096, 4097, 8192, 12289, 255, 64, *range(1, 61))


NARROW = ("bf16", "fp16")  # what weights are cast to, each in the library of its own precision


def _many() -> Iterable[Case]:
    for proceed in (1, 0):
        block = control(proceed=proceed)
        for momentum, nesterov in ((0.9, False), (0.9, True), (0.0, False)):
            a = Sgd(momentum, nesterov, 0.01 + proceed, rate=1.0 + proceed, clip_value=0.5 * proceed)
            states = 1 if momentum else 0
            operands = [(m(n), m(n), block, *(m(n) for _ in range(states))) for n in SIZES]
            yield _together("sgd_update", [a] * len(SIZES), operands)
        adamw = AdamW(weight_decay=0.1 + proceed, rate=1.0 + proceed, clip_value=0.5 * proceed)
        operands = [(m(n), m(n), block, m(n), m(n, make=positive)) for n in SIZES]
        yield _together("adamw_update", [adamw] * len(SIZES), operands)
        yield _together("ema_update", [Ema(0.9 + proceed / 100)] * len(SIZES), [(m(n), m(n), block) for n in SIZES])
        more = control(accumulated=proceed)
        yield _together("accumulate", [NoAttributes()] * len(SIZES), [(m(n), m(n), more) for n in SIZES])
        yield from _layerwise(block)
        yield from _parts(proceed)
        running = [UpdateRunning(0.1 + proceed / 10, 2 + n) for n in SIZES]
        vectors = [(m(n), m(n, make=positive), m(n), m(n, make=positive), block) for n in SIZES]
        yield _together("update_running", running, vectors)
    for narrow in NARROW:
        yield _together("cast", [Cast(narrow)] * len(SIZES), [(m(n),) for n in SIZES])
    yield _together("cast", [Cast("fp32")] * len(SIZES), [(w(n),) for n in SIZES])


def _layerwise(block: Operand) -> Iterable[Case]:
    count = len(SIZES)
    ratio = LarsRatio(0.01, 1e-8, 0.1, 0.5)
    yield _together("lars_ratio", [ratio] * count, [(m(n), m(n), block) for n in SIZES])
    for a in (Sgd(0.9, False, 0.1, 3.0), Sgd(0.9, True, 0.1), Sgd(0.0, False, 0.1, clip_value=0.5)):
        states = 1 if a.momentum else 0
        operands = [(m(n), m(n), block, m(1), *(m(n) for _ in range(states))) for n in SIZES]
        yield _together("lars_update", [a] * count, operands)
    lamb = AdamW(eps=1e-6, weight_decay=0.1, rate=3.0, clip_value=0.5)
    yield _together("lamb_ratio", [lamb] * count, [(m(n), m(n), block, m(n), m(n, make=positive)) for n in SIZES])
    yield _together("lamb_update", [lamb] * count, [(m(n), block, m(n), m(n, make=positive), m(1)) for n in SIZES])


def _parts(proceed: int) -> Iterable[Case]:
    """Yield cases of many parameters on the last of three ranks. Gradients are whole or parts in turn."""
    block, wholes = control(proceed=proceed, rank=2), [n for n in SIZES if n > 1]
    for kind, a in (("sgd_update_part", Sgd(0.9, bool(proceed), 0.01)), ("adamw_update_part", AdamW(weight_decay=0.1))):
        operands: list[tuple[Operand, ...]] = []
        for at, n in enumerate(wholes):
            part = -(-n // 3)
            second = (m(part, make=positive),) if isinstance(a, AdamW) else ()
            operands.append((m(n), m(n if at % 2 else part), block, m(part), *second))
        yield _together(kind, [a] * len(operands), operands)


GROUPS = (*_cases(), *_ups(), *_points(), *_beside_norms(), *_in_halves(), *_many())
GENERATED_GROUPS = tuple(c for c in GROUPS if c.kind in {k.kind for k in KERNELS.values() if not k.file})


def groups_in(precision: Precision) -> list[Case]:
    """Return the cases that a plan of the precision can have; casts to other narrow types are left out."""
    others = [narrow for narrow in NARROW if narrow != precision]
    return [
        case
        for case in GROUPS
        if case not in GENERATED_GROUPS and not any(f"'{narrow}'" in case.name for narrow in others)
    ]
