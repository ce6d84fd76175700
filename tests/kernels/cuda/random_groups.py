"""Groups of pointwise operations, drawn by a seed: trees and graphs of any kind that has a device expression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ops import KINDS, POINTWISE
from mbc.ops.activation import LeakyRelu, Scale
from mbc.ops.activation_variants import Elu
from mbc.ops.arithmetic import Broadcast
from mbc.ops.base import NoAttributes
from mbc.ops.batch_normalize import BatchNormalize, BatchNormalizeBackward
from mbc.ops.comparison import Relation, Select
from mbc.ops.elementary import Power
from mbc.ops.fused import join
from mbc.ops.instance_norm import InstanceNormalize, InstanceNormalizeBackward
from mbc.ops.piecewise import Clamp, Indicator
from mbc.ops.reduce import Expand, Reduce
from tests.kernels.cuda.cases import Case, Operand, Shape, normal, positive

SIZES = (1, 2, 3, 4, 5, 8, 16, 17, 24)
MOST_ELEMENTS = 6_000
# Operators by kind of operation, with the attributes that they are drawn with.
ATTRIBUTES: Mapping[str, tuple[Attributes, ...]] = MappingProxyType(
    {
        "leaky_relu": (LeakyRelu(0.1),),
        "elu": (Elu(0.7),),
        "scale": (Scale(0.5, 0.25), Scale(-2.0)),
        "pow": tuple(map(Power, (0.5, 1.0, 2.0, -1.0, 1.5))),
        "clamp": (Clamp((-0.5,), (0.7,)), Clamp((), (0.3,)), Clamp((-0.2,), (), strict=True)),
        "indicator": tuple(Indicator(operator, 0.1) for operator in ("eq", "ne", "lt", "le", "gt", "ge")),
        "broadcast": tuple(map(Broadcast, ("add", "sub", "mul", "div", "rsub", "rdiv", "prelu", "prelu_slope"))),
        "select": tuple(Select(o, 1, 0.5) for o in ("maximum", "minimum", "fill", "keep", "rfill", "rkeep")),
        "relation": tuple(map(Relation, ("eq", "ne", "lt", "le", "gt", "ge", "max_share", "rmax_share"))),
        "batch_normalize": (BatchNormalize(1e-3),),
        "batch_normalize_backward": (BatchNormalizeBackward(1e-3, 50),),
        "batch_normalize_backward_frozen": (BatchNormalize(1e-3),),
        "batch_normalize_backward_reduce": (BatchNormalize(1e-3),),
        "instance_normalize": (InstanceNormalize(1e-3),),
        "instance_normalize_backward": (InstanceNormalizeBackward(1e-3, 50),),
        "instance_normalize_backward_reduce": (InstanceNormalize(1e-3),),
    }
)  # fmt: skip
POSITIVE = ("sqrt", "log", "pow")  # operands must be positive, also those of their gradients
BOUNDED = ("exp",)  # of numbers that the group computes, which may be large
TWO_TENSORS = ("add", "mul")
# By kind: numbers of constants for each channel of each sample, and for each channel.
CHANNELS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "bias_add": (0, 1),
        "batch_normalize": (0, 4),
        "batch_normalize_backward": (0, 5),
        "batch_normalize_backward_frozen": (0, 2),
        "instance_normalize": (2, 2),
        "instance_normalize_backward": (4, 1),
    }
)
DOTS = ("pixel_dot", "reduce_dot")
SUMS = (*DOTS, "channel_sum", "batch_normalize_backward_reduce", "instance_normalize_backward_reduce")
GATES = ("broadcast_mul", "broadcast_add")
REPEATING = (*GATES, "broadcast", "select", "relation", "expand")
KINDS_DRAWN = tuple(sorted(kind for kind, about in KINDS.items() if about.device is not None))


@dataclass
class Drawing:
    """A group while it is drawn, with the operations so far and the operands that they read."""

    rng: np.random.Generator
    shape: Shape
    operations: list[Operation] = field(default_factory=list[Operation])
    operands: dict[str, Operand] = field(default_factory=dict[str, Operand])
    whole: list[str] = field(default_factory=list[str])  # computed values of the results' shape

    @property
    def gate(self) -> Shape:
        """Shape of one number for each channel of each sample."""
        return (*self.shape[:2], *(1,) * (len(self.shape) - 2))

    @property
    def has_positions(self) -> bool:
        """True if a channel of a sample has several positions."""
        return self.gate != self.shape

    def operand(self, shape: Shape, dtype: str = "working", safe: bool = False) -> str:
        name = f"x{len(self.operands)}"
        self.operands[name] = Operand(dtype, shape, positive if safe else normal)
        return name

    def value(self, safe: bool = False) -> str:
        """Return a value of the results' shape, mostly one that was computed, so that the group is connected."""
        if self.whole and not safe and self.rng.random() < 0.7:
            return str(self.rng.choice(self.whole))
        return self.operand(self.shape, safe=safe)

    def append(self, kind: str, attributes: Attributes, inputs: tuple[str, ...], whole: bool = True) -> str:
        output = f"v{len(self.operations)}"
        self.operations.append(Operation(f"op{len(self.operations)}", kind, inputs, (output,), attributes))
        self.whole += [output] * whole
        return output

    def reduce(self, kind: str, attributes: Attributes) -> None:
        """Append a reduction over everything but the channels, whose outputs no operation reads."""
        if len(self.shape) < 2 or kind in {operation.kind for operation in self.operations}:
            return
        if kind.startswith("instance") and not self.has_positions:
            return
        one = kind == "channel_sum"
        shape = self.gate if kind.startswith("instance") else self.shape[1:2]
        vectors = () if one else tuple(self.operand(shape, "master", safe=True) for _ in range(2))
        tensors = (self.value(),) if one else (self.value(), self.value())
        number = len(self.operations)
        outputs = (f"sum{number}",) if one else (f"dgamma{number}", f"dbeta{number}")
        self.operations.append(Operation(f"op{number}", kind, (*tensors, *vectors), outputs, attributes))

    def dot(self, kind: str) -> None:
        """Append a product with a function of a repeated operand, and the gradient of that operand."""
        pixels, rank = kind == "pixel_dot", len(self.shape)
        long = [axis for axis in range(1 + pixels, rank) if self.shape[axis] > 1]
        if not long:
            return
        first = int(self.rng.choice(long))
        axes = tuple(axis for axis in range(1 + pixels, rank) if pixels or axis == first or self.rng.random() < 0.5)
        small = tuple(1 if axis in axes else size for axis, size in enumerate(self.shape))
        attributes = NoAttributes() if pixels else Reduce(axes, small[1:], 0.5)
        y = self.append("tanh", NoAttributes(), (self.operand(small),), whole=False)
        self.append("broadcast", Broadcast("mul"), (self.value(), y))
        dy = self.append(kind, attributes, (self.value(), self.value()), whole=False)
        self.append("tanh_backward", NoAttributes(), (y, dy), whole=False)
        if self.rng.random() < 0.3:  # a function that the sums do not need, by an object in C
            gelu = POINTWISE["gelu"].attributes()
            self.append("gelu_backward", gelu, (self.operand(small), self.operand(small)), whole=False)

    def draw(self, kind: str) -> None:
        """Append an operation of the kind, unless the results have too few axes for it."""
        plain = kind.removesuffix("_backward")
        defaults = POINTWISE[plain].attributes if plain in POINTWISE else NoAttributes
        choices = ATTRIBUTES.get(kind) or ATTRIBUTES.get(plain) or (defaults(),)
        attributes = choices[self.rng.integers(len(choices))]
        safe = plain in POSITIVE
        channels = (self.shape[1],) if len(self.shape) > 1 else ()
        if isinstance(attributes, Broadcast):
            self.append(kind, *self._broadcast(attributes))
        elif kind == "expand":
            self._expand()
        elif kind in DOTS:
            self.dot(kind)
        elif kind in SUMS:
            self.reduce(kind, attributes)
        elif kind in CHANNELS:
            samples, vectors = CHANNELS[kind]
            if channels and (not samples or self.has_positions):
                tensors = (self.value(), self.value())[: 1 + kind.endswith("_backward")]
                shapes = (*(self.gate,) * samples, *(channels,) * vectors)
                inputs = (*tensors, *(self.operand(shape, "master", safe=True) for shape in shapes))
                self.append(kind, attributes, inputs)
        elif kind in GATES:
            if len(self.shape) > 2:
                self.append(kind, attributes, (self.value(), self.operand(self.gate)))
        elif kind.endswith("_backward") or kind in TWO_TENSORS:
            self.append(kind, attributes, (self.value(safe), self.value()))
        else:
            self.append(kind, attributes, (self.operand(self.shape) if plain in BOUNDED else self.value(safe),))

    def _broadcast(self, a: Broadcast) -> tuple[Broadcast, tuple[str, str]]:
        rank = len(self.shape)
        form = self.rng.integers(4)
        shape = self.shape
        if form == 0 and rank > 1:
            a = replace(a, axis=int(self.rng.integers(1, rank)))
            shape = (self.shape[a.axis],)
        elif form == 1:
            shape = (self.shape[0], *(size if self.rng.random() < 0.5 else 1 for size in self.shape[1:]))
        elif form == 2 and rank > 2:
            shape = self.shape[-2:]
        safe = a.operator == "div"
        other = self.value(safe) if shape == self.shape else self.operand(shape, safe=True)
        return a, (self.value(a.operator == "rdiv"), other)

    def _expand(self) -> None:
        axes = tuple(axis for axis in range(1, len(self.shape)) if self.rng.random() < 0.5)
        if not axes:
            return
        kept = tuple(size for axis, size in enumerate(self.shape) if axis not in axes)
        self.append("expand", Expand(axes, self.shape[1:], 0.5), (self.operand(kept),))


def random_group(seed: int, reduction: str = "") -> Case | None:
    """Return a group of two to seven operations, of which some results are stored; None if only one was drawn.

    With a kind of `SUMS` as `reduction`, the group ends in one, and no operand is repeated but by `dot`.
    """
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(2 if reduction else 1, 6))
    excluded = (*SUMS, *REPEATING, *(CHANNELS if reduction in DOTS else ()))
    kinds = tuple(kind for kind in KINDS_DRAWN if not reduction or kind not in excluded)
    while True:
        shape = tuple(int(size) for size in rng.choice(SIZES, rank))
        if np.prod(shape) <= MOST_ELEMENTS:
            break
    drawing = Drawing(rng, (2, 3, 17_000) if reduction in DOTS and seed == 0 else shape)  # blocks share its sums
    for _ in range(int(rng.integers(2, 5 if reduction else 7))):
        drawing.draw(str(rng.choice(kinds)))
    if reduction:
        drawing.draw(reduction)
    operations = drawing.operations
    read = {name for operation in operations for name in operation.inputs}
    ends = set(SUMS) - set(DOTS)
    stored = [o for o in operations if o.kind in ends or read.isdisjoint(o.outputs) or rng.random() < 0.2]
    if len(operations) < 2:
        return None
    joined = join(operations, [name for operation in stored for name in operation.outputs])
    operands = tuple(drawing.operands[name] for name in joined.inputs)
    return Case(f"drawn-{seed}{'-' * bool(reduction)}{reduction}", joined.kind, joined.attributes, operands)
