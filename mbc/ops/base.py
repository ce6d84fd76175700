"""Definitions of operations: one `OpKind` (graph level) and, if the language can name it, one `Layer` (source level).

A new operation is one file in this folder that lists its `OPS` and `LAYERS`; `mbc/ops/__init__.py` collects them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from mbc.ir.graph import Attributes, Initializer, Operation, Ranks
from mbc.ir.types import DType, Precision, TensorType
from mbc.ops.device import Device
from mbc.ops.framework_calls import NO_CALLS, Calls

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class NoAttributes(Attributes):
    """Attributes of an operation without settings."""


class ShapeError(Exception):
    """Operands that do not fit together; the message names both shapes. The caller adds the place in the source."""


class Collectives(Protocol):
    """Computations of all ranks that share a mini-batch. Each rank passes an array at an equal point of the step."""

    @property
    def rank(self) -> int:
        """Number of this rank."""
        ...

    def sum_on_host(self, array: Array) -> Array:
        """Return the sum of all ranks' arrays, with equal bits on every rank."""
        ...

    def gather_on_host(self, array: Array) -> Array:
        """Return the arrays of all ranks in their order, [ranks, ...]."""
        ...


class NoOtherRanks:
    """Collectives of a call without other ranks. They raise ValueError."""

    rank = 0

    def sum_on_host(self, array: Array) -> Array:
        """Refuse to sum.

        Raises:
            ValueError: Always.
        """
        raise ValueError("a sum over ranks was asked for where there are none")

    def gather_on_host(self, array: Array) -> Array:
        """Refuse to gather.

        Raises:
            ValueError: Always.
        """
        raise ValueError("the arrays of all ranks were asked for where there are none")


NO_OTHER_RANKS = NoOtherRanks()


@dataclass(frozen=True)
class Call:
    """The context of an evaluation, besides its operands.

    Attributes:
        outputs: Types of the outputs for the rows of this call.
        first_row: Index in the mini-batch of the first row of this slice.
        batch: Rows of the whole mini-batch.
        precision: Precision in which the step computes.
        collectives: Computations over all ranks.
    """

    outputs: tuple[TensorType, ...]
    first_row: int
    batch: int
    precision: Precision
    collectives: Collectives = NO_OTHER_RANKS


class Gradients(Protocol):
    """Methods that a gradient rule may use; `mbc.passes.reverse_mode` implements them."""

    def needs(self, value: str) -> bool:
        """Return whether the gradient of this value is needed."""
        ...

    def type(self, value: str) -> TensorType:
        """Return the type of a value."""
        ...

    def has_rows(self, value: str) -> bool:
        """Return whether the first dimension of this value counts samples."""
        ...

    def producer(self, value: str) -> Operation | None:
        """Return the operation of the forward pass that computes a value; None for inputs and states."""
        ...

    def of_output(self, value: str) -> str | None:
        """Return the gradient of an output of the differentiated operation; None if no loss depends on the output."""
        ...

    def weight(self, loss: str) -> float:
        """Return the weight of this loss in the total, without the loss scale."""
        ...

    def emit(self, kind: str, attributes: Attributes, inputs: Sequence[str], *of: str) -> tuple[str, ...]:
        """Append an operation whose outputs are the gradients of the values `of`, and return the names of its outputs.

        Further outputs, if there are more than values in `of`, are named after the last of these.
        """
        ...


class Expansion(Protocol):
    """Methods with which an operation of a Network writes itself into a training or inference graph."""

    @property
    def control(self) -> str:
        """Name of the control block's value."""
        ...

    @property
    def ranks(self) -> Ranks | None:
        """Ranks that share the mini-batch; None for one GPU."""
        ...

    @property
    def working(self) -> DType:
        """Element type of activations."""
        ...

    def type(self, value: str) -> TensorType:
        """Return the type of a value."""
        ...

    def needs(self, value: str) -> bool:
        """Return whether the gradient of this value will be needed; always False in an inference graph."""
        ...

    def working_copy(self, state: str) -> str:
        """Return a copy of a state in the working type, or the state itself if it has that type."""
        ...

    def emit(
        self, kind: str, attributes: Attributes, inputs: Sequence[str], outputs: Sequence[str], name: str
    ) -> tuple[str, ...]:
        """Append an operation, and return the names of its outputs.

        An operation whose kind `updates` a state runs at the end of the step, after `guard`.
        """
        ...

    def update(self, state: str, value: str) -> None:
        """Record that state `state` has the value `value` after the step."""
        ...


@dataclass(frozen=True)
class OpKind:
    """One kind of operation.

    Attributes:
        name: Name of the kind.
        attributes: Class of its attributes.
        shape: Returns the types of the outputs for those of the inputs; raises ShapeError.
        evaluate: Computes the operation on NumPy arrays in CHANNELS_FIRST order. Floating operands are float32, or
            float64 if they are fp64; the caller rounds results to their storage type. Works on any slice of rows if
            `divisible`.
        gradient: Returns the gradients of the inputs (None: not needed, or zero) for that of the first output that has
            one, or for the control block, which holds the loss scale, if the operation is a loss. It is called only
            where such a gradient and an input that needs one exist.
        expand: Writes the operation for training and for inference, where these differ from a Network.
        divisible: Rows of the outputs depend only on the same rows of the inputs, or outputs that are not per sample
            are sums over rows (`accumulates`).
        accumulates: Outputs that are not per sample are sums over rows, into which other rows can be accumulated.
        in_place: Pairs (output, input) that may share bytes if the input is not needed afterwards.
        updates: Pairs (output, input) that must share bytes: the output is the input's next version. A pair does not
            apply if the operation lacks the operand (sgd without momentum).
        working_inputs: Inputs (weights) that are read in the working precision; the training graph casts them.
        reduces: No output is per sample, even if an input is: sums over rows, statistics, losses.
        loss: The first output is a scalar that can be minimised; the other outputs are metrics.
        classifies: Input 0 holds logits (classes on axis 1), input 1 the class numbers or the probabilities of all
            classes; output 1 is the number of positions whose largest logit is that of the target.
        labelled: Input 0 holds logits (classes on axis 1), input 1 the class numbers; no output counts correct
            positions.
        flops: Returns the multiplications and additions of a matrix product, for the types of inputs and outputs (None:
            memory bounds the operation).
        reads: Returns the share of each input that is read, for the attributes and the types of the inputs (None: all).
        signs: Inputs of which only the sign is read, so that one bit an element would suffice.
        probabilities: Inputs that hold probabilities, for which random numbers of either sign would be meaningless.
        broadcasts: Inputs of fewer axes than the first one have no rows.
        rowless: Returns the inputs that have no rows whatever their shape is, for the attributes and the number of
            inputs.
        view: The output is the bytes of the input with another shape (canonical layout); no kernel runs.
        device: Returns the only output of one element as an expression in C, for the attributes and the number of
            inputs; inputs are broadcast to the shape of the output. Kernels are generated from it.
        calls: The equivalent in other frameworks.
    """

    name: str
    attributes: type[Attributes]
    shape: Callable[[Any, tuple[TensorType, ...]], tuple[TensorType, ...]]
    evaluate: Callable[[Any, Sequence[Array], Call], tuple[Array, ...]] | None = None
    gradient: Callable[[Gradients, Operation, str], tuple[str | None, ...]] | None = None
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
    device: Device | None = None
    calls: Calls = NO_CALLS


Setting = int | float | bool | str | tuple[int | float, ...]


@dataclass(frozen=True)
class Parameter:
    """One setting of a layer in the language.

    Attributes:
        name: Name of the setting.
        kind: int, float, real (a float that may be infinite), bool, spatial (an int, or one for each spatial axis),
            factors (a number, or one for each spatial axis), sides (an int, one for each spatial axis, or one before
            and one after each axis), index (an int or one of `words`), numbers (a tuple of any length), sizes or axes
            (an int or a tuple of any length, given as a tuple), or word (one of `words`).
        default: Value if the setting is not given; None: the setting is required.
        words: Words that the setting accepts.
    """

    name: str
    kind: str
    default: Setting | None = None
    words: tuple[str, ...] = ()


class LayerBuilder(Protocol):
    """Methods with which a layer writes itself into a Network; `mbc.frontend.building` implements them."""

    def type(self, value: str) -> TensorType:
        """Return the type of a value."""
        ...

    def has_rows(self, value: str) -> bool:
        """Return whether the first dimension of this value counts samples.

        Parameters, and values that are computed from parameters alone, have no rows.
        """
        ...

    def producer(self, value: str) -> Operation | None:
        """Return the operation that computes a value; None for inputs and states."""
        ...

    def state(self, suffix: str, shape: tuple[int, ...], initializer: Initializer, trained: bool = True) -> str:
        """Return the parameter (or statistic) `<path>.<suffix>` of this layer, or `<path>` without a suffix.

        The first application of a layer creates the state, and later applications share it.
        """
        ...

    def emit(self, kind: str, attributes: Attributes, inputs: Sequence[str], suffix: str = "") -> tuple[str, ...]:
        """Append an operation named `<path>` or `<path>.<suffix>`, and return the names of its outputs."""
        ...


@dataclass(frozen=True)
class Layer:
    """A layer that the language can call: it computes one tensor, or several as a tuple.

    Attributes:
        name: Name of the layer.
        parameters: Settings in positional order.
        build: Writes the layer. It gets the settings by name, with defaults filled in and kinds checked.
        inputs: Least and largest number of tensors piped in (largest None: any).
        help: Documentation of the layer in the language.
        loss: The layer computes a scalar that `loss` accepts.
        metric: The layer computes a scalar that only `metric` accepts.
        broadcasts: The layer takes tensors without rows together with others.
        takes_bytes: The layer takes an input that is declared `: uint8`.
        calls: The equivalent in other frameworks, with settings in place of attributes.
    """

    name: str
    parameters: tuple[Parameter, ...]
    build: Callable[[LayerBuilder, dict[str, Any], tuple[str, ...]], str | tuple[str, ...]]
    inputs: tuple[int, int | None] = (1, 1)
    help: str = ""
    loss: bool = False  # gives a scalar that `loss` accepts
    metric: bool = False  # gives a scalar that `metric` alone accepts
    broadcasts: bool = False  # takes tensors without rows together with others
    takes_bytes: bool = False  # of an input that is declared `: uint8`
    calls: Calls = NO_CALLS

    @property
    def scalar(self) -> bool:
        """True if the layer computes a scalar for `loss` or `metric`."""
        return self.loss or self.metric


def master(dtype: DType) -> DType:
    """Return the element type of sums, statistics and parameter gradients for activations of type `dtype`."""
    return DType.FP64 if dtype is DType.FP64 else DType.FP32
