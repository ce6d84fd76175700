"""The declaration of a function of one tensor, element by element; all else about the function follows from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Gradients, Layer, LayerBuilder, NoAttributes, OpKind, Parameter, ShapeError
from mbc.ops.device import device
from mbc.ops.framework_calls import NO_CALLS, Calls


def same_shape(_: Any, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    """Return the type of the operands, which is that of the result.

    Raises:
        ShapeError: The operands differ in shape or element type.
    """
    first = inputs[0]
    for other in inputs[1:]:
        if other.shape != first.shape:
            raise ShapeError(f"the shapes {first} and {other} differ")
        if other.dtype != first.dtype:
            raise ShapeError(f"the element types of {first} and {other} differ")
    return (first,)


@dataclass(frozen=True)
class Pointwise:
    """A function of each element of one tensor.

    Its kinds are `name`, and `<name>_backward`, whose operands are the input (or the output) and dy.

    Attributes:
        name: Name of the kind, and of the layer.
        forward: Computes the output from attributes and input, by NumPy, in the input's dtype.
        backward: Computes the gradient of the input from attributes, input (or output) and dy, likewise.
        device: Both as expressions in C: over `x`, and over `dy` and `x` (or `y`).
        help: Documentation of the layer in the language; empty: the language has another layer, or none.
        calls: The equivalent in other frameworks.
        attributes: Class of the attributes. Its fields are the settings of the layer.
        reals: Names of attributes or properties that the expressions in C read; None: all attributes.
        of_output: The gradient reads the output rather than the input.
        signs: As in `OpKind`, for the gradient.
    """

    name: str
    forward: Callable[[Any, Array], Array]
    backward: Callable[[Any, Array, Array], Array]
    device: tuple[str, str]
    help: str = ""
    calls: Calls = NO_CALLS
    attributes: type[Attributes] = NoAttributes
    reals: tuple[str, ...] | None = None
    of_output: bool = False
    signs: tuple[int, ...] = ()

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the attributes."""
        return tuple(field.name for field in fields(self.attributes))

    @property
    def kinds(self) -> tuple[OpKind, OpKind]:
        """The function and its gradient as operations of a graph."""
        reals = self.settings if self.reals is None else self.reals
        read = "y" if self.of_output else "x"
        return (
            OpKind(
                self.name,
                self.attributes,
                same_shape,
                lambda a, inputs, call: (self.forward(a, inputs[0]),),
                self._gradient,
                divisible=True,
                in_place=((0, 0),),
                device=device("x", self.device[0], *reals),
                calls=self.calls,
            ),
            OpKind(
                f"{self.name}_backward",
                self.attributes,
                same_shape,
                lambda a, inputs, call: (self.backward(a, inputs[0], inputs[1]),),
                divisible=True,
                in_place=((0, 1),),
                signs=self.signs,
                device=device(f"{read}, dy", self.device[1], *reals),
            ),
        )

    def _gradient(self, g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
        read = op.outputs if self.of_output else op.inputs
        return g.emit(f"{op.kind}_backward", op.attributes, (*read, dy), *op.inputs)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layer of the language, if it is the function alone."""

        def build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
            return builder.emit(self.name, self.attributes(**settings), inputs)[0]

        defaults = tuple(
            Parameter(field.name, "float", field.default if isinstance(field.default, float) else None)
            for field in fields(self.attributes)
        )
        return (Layer(self.name, defaults, build, help=self.help, calls=self.calls),) if self.help else ()


def kinds_of(functions: Sequence[Pointwise]) -> tuple[OpKind, ...]:
    """Return the kinds of operations of some functions, each before its gradient."""
    return tuple(kind for function in functions for kind in function.kinds)


def layers_of(functions: Sequence[Pointwise]) -> tuple[Layer, ...]:
    """Return the layers of some functions."""
    return tuple(layer for function in functions for layer in function.layers)
