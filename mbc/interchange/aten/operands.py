"""The classes that represent a tensor of the program during its translation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn, TypeVar

from mbc.interchange.program import Array, Held

N = TypeVar("N", int, float)


class Refused(Exception):
    """An operation that cannot be translated, with the reason and a remedy."""

    def __init__(self, reason: str, remedy: str) -> None:
        """Create the refusal of an operation.

        Args:
            reason: The part of a sentence after "cannot take the operation:"; its subject is the operation.
            remedy: The part of a sentence that says in the imperative how to change the model.
        """
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Atom:
    """A factor of an axis: index i of the axis has index i // stride % size of the factor."""

    axis: int
    stride: int
    size: int


Axes = tuple[tuple[Atom, ...], ...]


class Order(Enum):
    """Views that keep all elements and have no parameters.

    `FLAT` views [N, C, H, W] as [N, C * H * W], `CHANNELS_LAST` as [N, H, W, C]; `GATE` views [N, C] as [N, C, 1, 1].
    """

    PLAIN = "plain"
    FLAT = "flat"
    CHANNELS_LAST = "channels_last"
    GATE = "gate"


PLAIN, FLAT, CHANNELS_LAST, GATE = Order.PLAIN, Order.FLAT, Order.CHANNELS_LAST, Order.GATE


@dataclass(frozen=True, slots=True)
class Padded:
    """The view of an image with zeros, or another number, around it: `pad` is before and after each spatial axis."""

    pad: tuple[int, ...]
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Expanded:
    """The view of a tensor that is repeated up to `shape`; operators repeat their operands without a layer."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Factored:
    """The view of a tensor by the factors of its axes, in any order (`mbc.interchange.aten.factors`).

    `picks` are factors with the one index that is taken; all elements are multiplied by `factor`.
    """

    axes: Axes
    picks: tuple[tuple[Atom, int], ...] = ()
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the view."""
        return tuple(math.prod(atom.size for atom in axis) for axis in self.axes)


View = Order | Padded | Expanded | Factored


@dataclass(frozen=True, slots=True)
class Activation:
    """A tensor of the network: value number, shape of the value, and the view that the program has of it.

    A view costs nothing until a layer needs the bytes in its order. Views are immutable: a rule passes on a view, or
    replaces it by another view.
    """

    value: int
    shape: tuple[int, ...]
    view: View = PLAIN

    @property
    def seen(self) -> tuple[int, ...]:
        """The shape that the program sees."""
        if isinstance(self.view, Expanded | Factored):
            return self.view.shape
        if isinstance(self.view, Padded):
            pad = self.view.pad
            return (*self.shape[:2], *map(sum, zip(self.shape[2:], pad[::2], pad[1::2], strict=True)))
        if self.view is FLAT:
            return (self.shape[0], math.prod(self.shape[1:]))
        if self.view is CHANNELS_LAST:
            return (self.shape[0], *self.shape[2:], self.shape[1])
        return (*self.shape, 1, 1) if self.view is GATE else self.shape

    @property
    def is_pending(self) -> bool:
        """True if the view has work left to do: zeros around it, a repetition, a selection or a factor."""
        if isinstance(self.view, Factored):
            return bool(self.view.picks) or self.view.factor != 1.0
        return isinstance(self.view, Padded | Expanded)


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, buffer or constant, viewed in some shape."""

    held: Held
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scaled:
    """A parameter times a number, such as the gains of standardised filters."""

    weight: Weight
    factor: float


@dataclass(frozen=True, slots=True)
class Computed:
    """A value [1, *shape] that is computed from parameters alone (`mbc.interchange.aten.parameters`)."""

    value: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Standardized:
    """Filters, each standardised by its mean and variance and multiplied by its `gain`, viewed in some shape.

    `eps` is added to the variance.
    """

    weight: Weight
    shape: tuple[int, ...]
    eps: float
    gain: Scaled | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Numbers that do not depend on the input.

    With `weight`, the array holds indices into the flattened parameter.
    """

    array: Array
    weight: Weight | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Products of query and key, [N * windows, heads, T, S], which are never computed alone.

    The scores become attention when they are multiplied by the values. `bias` holds the numbers that are added to them.
    `shares` is True after the softmax.
    """

    query: Activation
    key: Activation
    shape: tuple[int, ...]
    bias: tuple[Known, ...] = ()
    shares: bool = False


@dataclass(frozen=True, slots=True)
class Noise:
    """Random ones and zeros times `scale`, for stochastic depth; an element is one with probability `keep`.

    `source` names the tensor of the program that was drawn.
    """

    source: str
    shape: tuple[int, ...]
    keep: float = 1.0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Unknown:
    """The result of an operation that could not be translated; operations that depend on it are passed over."""


@dataclass(frozen=True, slots=True)
class Untaken:
    """A result that nothing can use, such as the positions of maxima, with the reason and a remedy."""

    reason: str
    remedy: str


UNKNOWN = Unknown()
Operand = Activation | Weight | Computed | Scaled | Standardized | Known | Scores | Noise | Unknown | Untaken
Result = Operand | tuple[Operand, ...]


def refuse_calculation(weight: Weight) -> NoReturn:
    """Raise Refused for a parameter that is computed with before a layer takes it.

    Raises:
        Refused: Always.
    """
    raise Refused(
        f"it calculates with the {weight.held.kind} '{weight.held.key}' before a layer takes it",
        "hold the result as a parameter, and use it in a layer or with a tensor of the network",
    )


def as_activation(operand: Operand) -> Activation:
    """Return an operand as a tensor of the network.

    Raises:
        Refused: The operand is a parameter, a constant, scores or random numbers, which only a few operations take.
    """
    if isinstance(operand, Activation):
        return operand
    if isinstance(operand, Weight):
        message = f"it takes the {operand.held.kind} '{operand.held.key}' as a tensor"
        raise Refused(message, "use it in a layer of torch.nn")
    if isinstance(operand, Scaled | Standardized):
        refuse_calculation(operand.weight)
    if isinstance(operand, Computed):
        raise Refused("it takes a tensor computed from parameters alone", "add it to a tensor of the network first")
    if isinstance(operand, Known):
        raise Refused("it takes numbers that do not depend on the input", "hold them as a parameter or buffer")
    if isinstance(operand, Scores):
        raise Refused("it takes the scores of attention", "use torch.nn.functional.scaled_dot_product_attention")
    raise Refused("it takes random numbers", "use torch.nn.Dropout or stochastic depth of whole samples")


def shape_of(operand: Operand | None) -> tuple[int, ...] | None:
    """Return the shape of an operand, as the program sees it; None if the operand represents no tensor."""
    if isinstance(operand, Activation):
        return operand.seen
    if isinstance(operand, Known):
        return operand.array.shape
    if isinstance(operand, Scaled):
        return operand.weight.shape
    return None if operand is None or isinstance(operand, Unknown | Untaken) else operand.shape


SLICE_ARGUMENTS = ("start", "end", "step")


def indices_of(size: int, start: int | None, end: int | None, step: int | None) -> range:
    """Return the indices that a slice takes along a dimension of `size` elements; None stands for a bound left out."""
    return range(*slice(start, end, step).indices(size))


def as_setting(values: Sequence[N]) -> N | tuple[N, ...]:
    """Return one number if all values are equal, else the values."""
    return values[0] if len(set(values)) == 1 else tuple(values)
