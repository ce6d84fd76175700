"""Dropout and stochastic depth from a counter-based generator: a mask can be recomputed for any rows at any time.

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
Key: low and high word of the seed. Counter: low and high word of the block, low 32 bits of the step, `key`.
Element i, counted in channels-first order over the whole mini-batch, takes output word i % 4 of block i // 4.
It is kept where word * 2^-32 < 1 - probability (exactly: where word < ceil((1 - probability) * 2^32)), and then
multiplied by 1 / (1 - probability). Stochastic depth (Huang et al., "Deep networks with stochastic depth", 2016) drops
whole samples: row i takes the word that element i of a vector would take.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Expansion, Gradients, Layer, LayerBuilder, OpKind, Parameter, ShapeError
from mbc.ops.control_record import control_record, control_shape


@dataclass(frozen=True, slots=True)
class Dropout(Attributes):
    """Settings of dropout.

    Attributes:
        probability: Probability that an element becomes zero.
        key: 32 bits that distinguish the dropouts of a network.
    """

    probability: float
    key: int = 0

    @property
    def threshold(self) -> int:
        """Bound of the random words of elements that are kept: these words are less."""
        return math.ceil((1 - self.probability) * 2**32)

    def drawn(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the mask for a tensor of this shape: 1 along axes that share a random number."""
        return shape


@dataclass(frozen=True, slots=True)
class DropPath(Dropout):
    """Settings of stochastic depth: dropout of whole samples."""

    def drawn(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the mask for a tensor of this shape: one element a sample."""
        return (shape[0], *(1,) * (len(shape) - 1))


@dataclass(frozen=True, slots=True)
class ChannelDropout(Dropout):
    """Settings of dropout of whole channels of a sample."""

    def drawn(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the mask for a tensor of this shape: one element for each channel of each sample."""
        return (*shape[:2], *(1,) * (len(shape) - 2))


def philox(key: tuple[int, int], blocks: Array, step: int, stream: int) -> Array:
    """Return ten rounds of Philox 4x32 for each block number: uint32 [len(blocks), 4]."""
    mask = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    c0, c1 = blocks & mask, blocks >> half
    c2 = np.full_like(blocks, step & 0xFFFFFFFF)
    c3 = np.full_like(blocks, stream & 0xFFFFFFFF)
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (right >> half) ^ c1 ^ np.uint64(k0), right & mask
        c2, c3 = (left >> half) ^ c3 ^ np.uint64(k1), left & mask
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), axis=-1).astype(np.uint32)


def dropout_keep(a: Dropout, shape: tuple[int, ...], first_row: int, seed: int, step: int) -> Array:
    """Return which elements of a slice of the mini-batch are kept, as bool.

    Args:
        a: The settings.
        shape: Shape of the slice.
        first_row: Index in the mini-batch of the slice's first row.
        seed: Seed of the training.
        step: Number of the step.
    """
    shape = a.drawn(shape)
    count = math.prod(shape)
    first = first_row * math.prod(shape[1:])
    blocks = np.arange(first // 4, (first + count + 3) // 4, dtype=np.uint64)
    words = philox((seed & 0xFFFFFFFF, seed >> 32), blocks, step, a.key).reshape(-1)
    start = first % 4
    return (words[start : start + count] < np.uint64(a.threshold)).reshape(shape)


def _shape(_: Dropout, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    # A Network has no control block yet.
    for control in inputs[1:]:
        control_shape(control)
    return (inputs[0],)


def _evaluate(a: Dropout, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    x, control = inputs
    record = control_record(control)
    keep = dropout_keep(a, x.shape, call.first_row, int(record["seed"]), int(record["step"]))
    return (np.where(keep, x * x.dtype.type(1 / (1 - a.probability)), 0).astype(x.dtype),)


def _expand(e: Expansion, op: Operation, training: bool) -> tuple[str, ...]:
    a = op.attributes
    assert isinstance(a, Dropout)
    if not training or a.probability == 0:
        return op.inputs
    # The key depends on the operation's path, so that adding or removing other layers keeps this layer's mask.
    keyed = replace(a, key=zlib.crc32(op.name.encode()))
    return e.emit(op.kind, keyed, (op.inputs[0], e.control), op.outputs, op.name)


def _gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    x, control = op.inputs
    return g.emit(f"{op.kind}_backward", op.attributes, (dy, control), x)[0], None


_KINDS: dict[str, type[Dropout]] = {"dropout": Dropout, "drop_path": DropPath, "channel_dropout": ChannelDropout}
OPS = tuple(
    kind
    for name, a in _KINDS.items()
    for kind in (
        OpKind(name, a, _shape, _evaluate, _gradient, _expand, divisible=True, in_place=((0, 0),)),
        OpKind(f"{name}_backward", a, _shape, _evaluate, divisible=True, in_place=((0, 0),)),
    )
)


def _build(kind: str) -> Callable[[LayerBuilder, dict[str, Any], tuple[str, ...]], str]:
    def build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
        if not 0 <= settings["p"] < 1:
            raise ShapeError(f"p is {settings['p']}, but must be at least 0 and less than 1")
        name = "channel_dropout" if settings.get("channels") else kind
        if name == "channel_dropout" and len(builder.type(inputs[0]).shape) < 2:
            raise ShapeError(f"{builder.type(inputs[0])} has no channels")
        return builder.emit(name, _KINDS[name](settings["p"]), inputs)[0]

    return build


LAYERS = (
    Layer(
        "dropout",
        (Parameter("p", "float", 0.5), Parameter("channels", "bool", False)),
        _build("dropout"),
        help="Zeroes elements with probability p in training, and scales the others by 1 / (1 - p). "
        "channels: zeroes whole channels of a sample.",
    ),
    Layer(
        "drop_path",
        (Parameter("p", "float"),),
        _build("drop_path"),
        help="Stochastic depth: zeroes whole samples with probability p in training, and scales the others by "
        "1 / (1 - p).",
    ),
)
