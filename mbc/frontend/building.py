"""A network under construction, to which layers append their operations, with limits of sizes."""

from __future__ import annotations

from collections.abc import Sequence

from mbc.errors import LayerError, MbcError
from mbc.frontend.settings import LARGEST_SETTING
from mbc.frontend.values import Tensor
from mbc.ir.graph import Attributes, Initializer, Operation, Role, State, Value
from mbc.ir.types import DType, TensorType
from mbc.ops.base import Layer, Setting, ShapeError
from mbc.passes.graph_builder import GraphBuilder
from mbc.source import Span

LARGEST_TENSOR = 2**47  # elements; byte offsets fit 64 bits
MOST_OPERATIONS = 200_000
MOST_DIMENSIONS = 8  # also those of an input


class Building:
    """The operations and states so far."""

    def __init__(self) -> None:
        """Begin without operations."""
        self._graph = GraphBuilder()
        self._states: dict[str, State] = {}
        self._producers: dict[str, Operation] = {}

    @property
    def values(self) -> dict[str, Value]:
        """Values by name."""
        return self._graph.values

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Operations in order."""
        return tuple(self._graph.operations)

    @property
    def states(self) -> tuple[State, ...]:
        """States in the order of the source."""
        return tuple(self._states.values())

    def type(self, value: str) -> TensorType:
        """Return the type of a value."""
        return self._graph.type(value)

    def has_rows(self, value: str) -> bool:
        """Return whether the first dimension of a value counts samples."""
        return self._graph.values[value].per_sample

    def has_states(self, path: str) -> bool:
        """Return whether a parameter or statistic is saved at this path or below it."""
        return any(name == path or name.startswith(f"{path}.") for name in self._states)

    def kind_of(self, value: str) -> str:
        """Return the kind of the operation that computes a value."""
        return self._producers[value].kind

    def producer(self, value: str) -> Operation | None:
        """Return the operation that computes a value; None for inputs and states."""
        return self._producers.get(value)

    def input(self, path: str, shape: tuple[int, ...], dtype: DType, span: Span) -> Tensor:
        """Declare an input, whose first dimension counts samples, and return it.

        Raises:
            MbcError: MBC014 or MBC015 if its shape is not possible.
        """
        kind = TensorType(shape, dtype)
        for size in shape:
            if size < 1 or size > LARGEST_SETTING:
                bad = "less than 1" if size < 1 else f"more than {LARGEST_SETTING}"
                message = f"input `{path}` has the shape [{', '.join(map(str, shape))}]: {size} is {bad}"
                remedy = f"every dimension, the batch included, must be from 1 to {LARGEST_SETTING}"
                raise MbcError("MBC014", message, remedy, span)
        _check_size(f"input `{path}`", kind, span)
        self._graph.declare(path, kind, Role.INPUT, per_sample=True, span=span)
        return Tensor(path, kind, span, path)

    def state(self, name: str, shape: tuple[int, ...], initializer: Initializer, trained: bool, span: Span) -> str:
        """Return the state of this name, which is created unless a shared layer has created it before.

        Raises:
            MbcError: MBC034 if it has another shape, MBC013 if an input has its name, MBC015 if it is too large.
        """
        kind = TensorType(shape, DType.FP32)
        if name in self._states:
            before = self._graph.type(name)
            if before != kind:
                first = self._graph.values[name].span
                place = f" by line {first.line}" if first is not None else ""
                raise MbcError(
                    "MBC034",
                    f"this layer is shared: its `{name}` is {before}{place}, but would have to be {kind} here",
                    "apply it to tensors that need the same parameters, or write a second layer",
                    span,
                )
            return name
        if name in self._graph.values:
            message = f"`{name}` is the path of a parameter here and the name of an input"
            raise MbcError("MBC013", message, "give the parameter another label", span)
        _check_size(f"`{name}`", kind, span)
        role = Role.PARAMETER if trained else Role.STATISTIC
        self._graph.declare(name, kind, role, span=span)
        self._states[name] = State(name, initializer)
        return name

    def emit(self, kind: str, attributes: Attributes, inputs: Sequence[str], name: str, span: Span) -> tuple[str, ...]:
        """Append an operation, and return its outputs.

        Raises:
            ShapeError: The operands do not fit together.
            MbcError: MBC017 or MBC015 if the network or a result is too large.
        """
        if len(self._graph.operations) >= MOST_OPERATIONS:
            message = f"the network has more than {MOST_OPERATIONS} operations"
            raise MbcError("MBC017", message, "make its loops shorter", span)
        outputs = self._graph.emit(kind, attributes, inputs, name, span=span)
        self._producers.update(dict.fromkeys(outputs, self._graph.operations[-1]))
        for output in outputs:
            _check_size(f"the result of `{name}`", self._graph.type(output), span)
        return outputs

    def apply(
        self, layer: Layer, settings: dict[str, Setting], inputs: Sequence[Tensor], path: str, span: Span
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the result of one application of a layer.

        Raises:
            MbcError: MBC011 with the origin of every shape.
        """
        try:
            _check_elements(layer, inputs)
            self._check_rows(layer, inputs)
            results = layer.build(_Application(self, path, span), dict(settings), tuple(t.value for t in inputs))
        except ShapeError as error:
            raise misfit(f"`{layer.name}`", error, inputs, span) from None
        if isinstance(results, str):
            return Tensor(results, self.type(results), span, path)
        return tuple(Tensor(value, self.type(value), span, path) for value in results)

    def _check_rows(self, layer: Layer, inputs: Sequence[Tensor]) -> None:
        """Check that tensors without rows are combined with tensors with rows only in layers that broadcast."""
        without = next((t for t in inputs if not self.has_rows(t.value)), None)
        if without is not None and not layer.broadcasts and any(self.has_rows(t.value) for t in inputs):
            raise ShapeError(f"{without.type} of `{without.path}` has no rows, but the other tensors have")


class _Application:
    """One application of one layer: the `LayerBuilder` to which the layer appends its operations."""

    def __init__(self, building: Building, path: str, span: Span) -> None:
        self._building = building
        self._path = path
        self._span = span

    def type(self, value: str) -> TensorType:
        return self._building.type(value)

    def has_rows(self, value: str) -> bool:
        return self._building.has_rows(value)

    def producer(self, value: str) -> Operation | None:
        return self._building.producer(value)

    def state(self, suffix: str, shape: tuple[int, ...], initializer: Initializer, trained: bool = True) -> str:
        name = f"{self._path}.{suffix}" if suffix else self._path
        return self._building.state(name, shape, initializer, trained, self._span)

    def emit(self, kind: str, attributes: Attributes, inputs: Sequence[str], suffix: str = "") -> tuple[str, ...]:
        name = f"{self._path}.{suffix}" if suffix else self._path
        return self._building.emit(kind, attributes, inputs, name, self._span)


def misfit(what: str, error: ShapeError, inputs: Sequence[Tensor], span: Span) -> MbcError:
    """Return the error of operands that do not fit together, with the origin of each."""
    lines = [f"{what} cannot be applied: {error}"]
    for number, tensor in enumerate(inputs, 1):
        place = f"{tensor.span.source.name}:{tensor.span.line}:{tensor.span.column}"
        which = "its tensor" if len(inputs) == 1 else f"tensor {number}"
        lines.append(f"  {which} is {tensor.type}, the result of `{tensor.path}` at {place}")
    remedy = "change the settings here, or the shape at its origin"
    return LayerError("MBC011", "\n".join(lines), remedy, span)


def _check_elements(layer: Layer, inputs: Sequence[Tensor]) -> None:
    for tensor in inputs:
        if tensor.type.dtype is DType.INT32 and not layer.scalar:
            message = f"{tensor.type} holds class numbers, which only a loss can read ({layer.name} needs float)"
            raise ShapeError(message)
        if tensor.type.dtype is DType.UINT8 and not layer.takes_bytes:
            message = f"{tensor.type} holds bytes, which `augment` converts to numbers ({layer.name} needs float)"
            raise ShapeError(message)


def _check_size(what: str, kind: TensorType, span: Span) -> None:
    if len(kind.shape) > MOST_DIMENSIONS:
        message = f"{what} has {len(kind.shape)} dimensions; at most {MOST_DIMENSIONS} are possible"
        raise MbcError("MBC015", message, "merge some of them by `reshape`", span)
    if kind.elements > LARGEST_TENSOR or max(kind.shape, default=0) > LARGEST_SETTING:
        shape = f"[{', '.join(map(str, kind.shape))}]"
        message = f"{what} of shape {shape} has {kind.elements} elements; at most {LARGEST_TENSOR} are possible"
        if kind.elements <= LARGEST_TENSOR:
            message = f"{what} of shape {shape} has a dimension of more than {LARGEST_SETTING}"
        raise MbcError("MBC015", message, "make the batch, the image or the layer smaller", span)
