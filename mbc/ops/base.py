"""What an operation is: one `OpKind` (graph level) and, if the language can name it, one `Layer` (source level).

A new operation is one file in this folder that lists its `OPS` and `LAYERS`; `mbc/ops/__init__.py` collects them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from mbc.ir.graph import Attributes, Initializer, Operation, Ranks
from mbc.ir.types import DType, Precision, TensorType

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class NoAttributes(Attributes):
    """An operation without settings."""


class ShapeError(Exception):
    """Operands that do not fit together; the message names both shapes. The caller adds the place."""


class Collectives(Protocol):
    """What the ranks that share a mini-batch compute together: each gives an array at the same point of the step."""

    @property
    def rank(self) -> int:
        """Which of them this one is."""
        ...

    def sum_on_host(self, array: Array) -> Array:
        """The sum of all ranks' arrays, the same bits everywhere."""
        ...

    def gather_on_host(self, array: Array) -> Array:
        """[ranks, ...]: the arrays of all ranks, in their order."""
        ...


class NoOtherRanks:
    """Of a call that knows of no ranks."""

    rank = 0

    def sum_on_host(self, array: Array) -> Array:
        raise ValueError("a sum over ranks was asked for where there are none")

    def gather_on_host(self, array: Array) -> Array:
        raise ValueError("the arrays of all ranks were asked for where there are none")


NO_OTHER_RANKS = NoOtherRanks()


@dataclass(frozen=True)
class Call:
    """What an evaluation knows beside its operands.

    `outputs`: types of the outputs for the rows of this call. `first_row`: index of the first row of this slice in
    the mini-batch. `batch`: rows of the whole mini-batch. `precision`: what the step computes in.
    """

    outputs: tuple[TensorType, ...]
    first_row: int
    batch: int
    precision: Precision
    collectives: Collectives = NO_OTHER_RANKS


class Gradients(Protocol):
    """What a gradient rule may use; `mbc.ir.transforms.training_step` implements it."""

    def needs(self, value: str) -> bool:
        """Whether somebody needs the gradient of this value."""
        ...

    def type(self, value: str) -> TensorType: ...

    def has_rows(self, value: str) -> bool:
        """Whether its first dimension counts samples."""
        ...

    def producer(self, value: str) -> Operation | None:
        """The operation of the forward pass that computes a value; None for inputs and states."""
        ...

    @property
    def control(self) -> str:
        """Name of the control block's value as it stands during forward and backward."""
        ...

    def weight(self, loss: str) -> float:
        """What this loss counts in the total, without the loss scale."""
        ...

    def emit(self, kind: str, attributes: Attributes, inputs: Sequence[str], *of: str) -> tuple[str, ...]:
        """Append an operation whose outputs are the gradients of the values `of`; returns the outputs' names.

        Further outputs, if there are more than values in `of`, are named after the last of them.
        """
        ...


class Expansion(Protocol):
    """What an operation of a Network may use to write itself into a training or inference graph."""

    @property
    def control(self) -> str: ...

    @property
    def ranks(self) -> Ranks | None:
        """Those that share the mini-batch; None for one GPU."""
        ...

    @property
    def working(self) -> DType:
        """The element type of activations."""
        ...

    def type(self, value: str) -> TensorType: ...

    def needs(self, value: str) -> bool:
        """Whether the gradient of this value will be asked for; never in an inference graph."""
        ...

    def working_copy(self, state: str) -> str:
        """A state in the working type: a copy, or the state itself."""
        ...

    def emit(
        self, kind: str, attributes: Attributes, inputs: Sequence[str], outputs: Sequence[str], name: str
    ) -> tuple[str, ...]:
        """Append an operation; one whose kind `updates` a state runs at the end of the step, after `guard`."""
        ...

    def update(self, state: str, value: str) -> None:
        """State `state` has the value `value` after the step."""
        ...


@dataclass(frozen=True)
class OpKind:
    """One kind of operation.

    shape      types of the outputs from those of the inputs; raises ShapeError
    evaluate   the meaning, on NumPy arrays in CHANNELS_FIRST order: floating operands come in float32 (float64 where
               they are fp64), results are rounded to their storage type by the caller. Works on any slice of rows
               when `divisible`
    gradient   gradients of the inputs from those of the outputs (None: not needed, or zero)
    expand     how the kind is written for training and for inference, where that is not as it is in a Network
    divisible  rows of the outputs depend on the same rows of the inputs only, or the outputs that are not per sample
               are sums over rows (`accumulates`)
    in_place   (output, input) pairs that may share bytes when the input is not needed afterwards
    updates    (output, input) pairs that must share bytes: the output is the input's next version.
               A pair whose operand an operation does not have (sgd without momentum) does not apply
    working_inputs  inputs (weights) that are read in the working precision: the training graph casts them
    reduces    no output is per sample, even where an input is: sums over rows, statistics, losses
    loss       the first output is a scalar that can be minimised; the other outputs are metrics
    classifies input 0 holds logits (classes on axis 1), input 1 the class numbers, or the probabilities of all classes;
               output 1 is the number of positions whose largest logit is that of the target
    labelled   input 0 holds logits (classes on axis 1), input 1 the class numbers, and nothing is counted
    flops      multiplications and additions of a matrix product, from the types of the inputs and of the outputs
               (None: what bounds the operation is memory)
    reads      what share of each input is read at all, from the attributes and the inputs' types (None: all of it)
    signs      inputs of which only the sign is read: a bit an element would do
    broadcasts inputs of fewer axes than the first one have no rows
    rowless    inputs that have no rows whatever their shape is, from the attributes and how many inputs there are
    probabilities  inputs that hold probabilities, where random numbers of either sign would mean nothing
    """

    name: str
    attributes: type[Attributes]
    shape: Callable[[Any, tuple[TensorType, ...]], tuple[TensorType, ...]]
    evaluate: Callable[[Any, Sequence[Array], Call], tuple[Array, ...]] | None = None
    gradient: Callable[[Gradients, Operation, tuple[str | None, ...]], tuple[str | None, ...]] | None = None
    expand: Callable[[Expansion, Operation, bool], tuple[str, ...]] | None = None
    divisible: bool = False
    accumulates: bool = False
    in_place: tuple[tuple[int, int], ...] = ()
    updates: tuple[tuple[int, int], ...] = ()
    working_inputs: tuple[int, ...] = ()
    reduces: bool = False
    loss: bool = False
    classifies: bool = False
    labelled: bool = False
    flops: Callable[[Any, tuple[TensorType, ...], tuple[TensorType, ...]], int] | None = None
    reads: Callable[[Any, tuple[TensorType, ...]], tuple[float, ...]] | None = None
    signs: tuple[int, ...] = ()
    probabilities: tuple[int, ...] = ()
    broadcasts: bool = False
    rowless: Callable[[Any, int], tuple[int, ...]] | None = None
    view: bool = False  # the output is the input's bytes under another shape (canonical layout); no kernel runs


Setting = int | float | bool | str | tuple[int | float, ...]


@dataclass(frozen=True)
class Parameter:
    """One setting of a layer in the language. `kind`: int | float | real (a float that may be
    infinite) | bool | pair (an int or (h, w)) |
    pads (an int, (h, w) or (top, bottom, left, right)) | index (an int or one of `words`) |
    numbers (a tuple of any length) | sizes, axes (an int or a tuple of any length, given as a tuple) |
    word (one of `words`). `default` None: required."""

    name: str
    kind: str
    default: Setting | None = None
    words: tuple[str, ...] = ()


class LayerBuilder(Protocol):
    """What a layer may use to write itself into a Network; `mbc.frontend.lower` implements it."""

    def type(self, value: str) -> TensorType: ...

    def has_rows(self, value: str) -> bool:
        """Whether its first dimension counts samples: parameters and what is made of them alone have none."""
        ...

    def producer(self, value: str) -> Operation | None:
        """Return the operation that makes a value; None for inputs and states."""
        ...

    def state(self, suffix: str, shape: tuple[int, ...], initializer: Initializer, trained: bool = True) -> str:
        """The parameter (or statistic) `<path>.<suffix>` of this layer, `<path>` without suffix; made once, shared by
        later applications."""
        ...

    def emit(self, kind: str, attributes: Attributes, inputs: Sequence[str], suffix: str = "") -> tuple[str, ...]:
        """Append an operation named `<path>` or `<path>.<suffix>`; returns its outputs' names."""
        ...


@dataclass(frozen=True)
class Layer:
    """What the language calls: it makes one tensor, or several as a tuple. `build` gets the settings by name, defaults
    filled in and kinds checked.

    `parameters` come in positional order. `inputs`: least and most number of tensors piped in (most None: any)."""

    name: str
    parameters: tuple[Parameter, ...]
    build: Callable[[LayerBuilder, dict[str, Any], tuple[str, ...]], str | tuple[str, ...]]
    inputs: tuple[int, int | None] = (1, 1)
    help: str = ""
    loss: bool = False  # gives a scalar that `loss` accepts
    metric: bool = False  # gives a scalar that `metric` alone accepts
    broadcasts: bool = False  # takes tensors without rows together with others
    takes_bytes: bool = False  # of an input that is declared `: uint8`

    @property
    def scalar(self) -> bool:
        return self.loss or self.metric


def master(dtype: DType) -> DType:
    """Element type of sums, statistics and parameter gradients where activations are `dtype`."""
    return DType.FP64 if dtype is DType.FP64 else DType.FP32
