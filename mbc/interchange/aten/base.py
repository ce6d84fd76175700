"""The call that a rule of an ATen operation receives, with methods that read arguments and write layers.

A family of rules is a file of this folder with a table `RULES`. The table maps the name of an operation to a function
that takes a `Call` and returns the operation's result. An operation that works in place has the name without the
trailing `_`. `NOT_TAKEN` names operations for which the language has no layer, with a remedy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn, Protocol

import numpy as np

from mbc.interchange.aten.factors import as_image, picked, settled
from mbc.interchange.aten.operands import (
    CHANNELS_LAST,
    FLAT,
    GATE,
    SLICE_ARGUMENTS,
    Activation,
    Computed,
    Expanded,
    Factored,
    Known,
    Noise,
    Operand,
    Padded,
    Refused,
    Result,
    Scaled,
    Scores,
    Standardized,
    Untaken,
    Weight,
    as_setting,
    indices_of,
)
from mbc.interchange.aten.operation_schemas import Parameter, Required, schema_of
from mbc.interchange.program import Argument, Array, Held, Node, Opaque, TensorMeta, TensorName
from mbc.interchange.steps import Number, Setting, Step


class Builder(Protocol):
    """The network that rules write layers into; `mbc.interchange.builder` implements it."""

    def operand(self, name: str) -> Operand:
        """Return the operand that represents a tensor of the program."""
        ...

    def meta(self, name: str) -> TensorMeta:
        """Return the shape, strides and type of a tensor of the program."""
        ...

    def array(self, held: Held) -> Array:
        """Return the numbers of a parameter, buffer or constant."""
        ...

    def step(
        self,
        op: str,
        inputs: Sequence[int | Number],
        shapes: Sequence[tuple[int, ...]],
        settings: Mapping[str, Setting],
        states: Mapping[str, tuple[Weight, tuple[int, ...]]],
        node: Node,
    ) -> tuple[Activation, ...]:
        """Add a step to the network and return its results.

        Args:
            op: A layer or an operator of the language.
            inputs: Value numbers, or numbers that stand in the source.
            shapes: The shape of each result.
            settings: The layer's settings.
            states: The layer's parameters and buffers, each with its shape in the network.
            node: The node that is translated.
        """
        ...

    def maker(self, value: int) -> tuple[Step, tuple[int, ...]] | None:
        """Return the step that gave a value, and the shape of its first input; None for inputs of the network."""
        ...

    def is_training(self) -> bool:
        """Return whether the program, or a node of it, is known to be in training mode."""
        ...

    def claim(self, source: str) -> bool:
        """Mark a random mask as used, and return False if it was used before."""
        ...

    def hold(self, array: Array) -> Held:
        """Add numbers to the network as a constant and return the constant."""
        ...


MOST_NUMBERS = 1 << 26  # largest constant that an import computes: 256 MiB
# Arguments that no rule reads: the place of the bytes, the library that computes, and the type of the result, which is
# checked for every node.
_PLACEMENT = frozenset(("ScalarType", "Layout", "Device", "MemoryFormat", "Generator"))
_PLACEMENT_FLAGS = frozenset(("pin_memory", "non_blocking", "copy", "cudnn_enabled", "cudnn_enable", "implicit"))


class Call:
    """One node of the program, with its arguments by their names in ATen's schema.

    A rule reads every argument that may change the result; `check_all_read` refuses all others.
    """

    def __init__(self, node: Node, builder: Builder) -> None:
        """Create the call of a node."""
        self.node = node
        self._builder = builder
        self._read: set[str] = set()
        self._settings: Mapping[str, Setting] = {}

    def with_settings(self, settings: Mapping[str, Setting]) -> Call:
        """Return a call whose operators are layers with these settings."""
        call = Call(self.node, self._builder)
        call._read, call._settings = self._read, settings
        return call

    # ---- arguments ----

    def argument(self, name: str) -> Argument:
        """Return an argument as it is written; None if it is left out."""
        self._read.add(name)
        return self.node.arguments.get(name)

    def check_all_read(self) -> None:
        """Raise Refused if an argument that the rule has not read differs from its default in the schema.

        Raises:
            Refused: The rule does not read an argument that may change the result.
        """
        schema = schema_of(self.node.target)
        parameters = {} if schema is None else {p.name: p for p in schema.parameters}
        for name, value in self.node.arguments.items():
            parameter = parameters.get(name)
            if name in self._read or (parameter is not None and _is_default(value, parameter)):
                continue
            raise Refused(f"its argument '{name}' is {_shown(value)}, which is not supported", "leave it out")

    def operand(self, name: str) -> Operand:
        """Return the operand that represents a tensor argument.

        Raises:
            Refused: The argument is no tensor.
        """
        value = self.argument(name)
        if not isinstance(value, TensorName):
            raise Refused(f"its argument '{name}' is no tensor", "give it a tensor")
        return self._operand(value)

    def _operand(self, name: TensorName) -> Operand:
        operand = self._builder.operand(name.name)
        if isinstance(operand, Untaken):
            raise Refused(operand.reason, operand.remedy)
        return operand

    def optional(self, name: str) -> Operand | None:
        """Return the operand that stands for a tensor; None if the argument is left out."""
        return None if self.argument(name) is None else self.operand(name)

    def operands(self, name: str) -> tuple[Operand, ...]:
        """Return the operands of an argument that is a list of tensors."""
        return tuple(operand for operand in self.optional_operands(name) if operand is not None)

    def optional_operands(self, name: str) -> tuple[Operand | None, ...]:
        """Return the operands of an argument that is a list of tensors, with None for each item that is left out."""
        value = self.argument(name)
        items = value if isinstance(value, tuple) else ()
        return tuple(self._operand(item) if isinstance(item, TensorName) else None for item in items)

    def is_tensor(self, name: str) -> bool:
        """Return whether an argument is a tensor."""
        return isinstance(self.node.arguments.get(name), TensorName)

    def lazy(self, name: str) -> Activation:
        """Return a tensor of the network as the program views it; the work of the view may still be pending."""
        return as_activation(self.operand(name))

    def activation(self, name: str) -> Activation:
        """Return a tensor of the network without pending work: the view only orders the elements of the value."""
        x = self.lazy(name)
        if isinstance(x.view, Padded | Expanded):
            return self.settle(x)
        return picked(self, x) if x.is_pending else x

    def plain(self, name: str) -> Activation:
        """Return a tensor of the network in the shape that the program sees."""
        return self.settle(self.lazy(name))

    def weight(self, name: str) -> Weight:
        """Return an argument that is a parameter, buffer or constant.

        Raises:
            Refused: The argument is computed.
        """
        operand = self.operand(name)
        if not isinstance(operand, Weight):
            raise Refused(f"its {name} is computed, not a parameter", "hold it as a parameter of the module")
        return operand

    def optional_weight(self, name: str) -> Weight | None:
        """Return an argument that is a parameter, buffer or constant; None if it is left out."""
        return None if self.argument(name) is None else self.weight(name)

    def integer(self, name: str, default: int) -> int:
        """Return an integer argument, or `default` if it is left out."""
        return int(self._number(name, default))

    def real(self, name: str, default: float) -> float:
        """Return a real argument, or `default` if it is left out."""
        return float(self._number(name, default))

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean argument, or `default` if it is left out."""
        return bool(self._number(name, default))

    def text(self, name: str, default: str) -> str:
        """Return a text argument, or `default` if there is no text."""
        value = self.argument(name)
        return value if isinstance(value, str) else default

    def ints(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return an argument that is a list of integers; one integer gives a list of one.

        Raises:
            Refused: An item depends on data.
        """
        value = self.argument(name)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,)
        if not isinstance(value, tuple) or not all(isinstance(item, int) for item in value):
            raise Refused(f"its '{name}' is not known before it runs", "export it with fixed sizes")
        return tuple(item for item in value if isinstance(item, int))

    def slice_of(self, size: int) -> range:
        """Return the indices along a dimension of `size` elements that the arguments start, end and step take."""
        return indices_of(size, *(self.integer(n, d) for n, d in zip(SLICE_ARGUMENTS, (0, size, 1), strict=True)))

    @property
    def rank(self) -> int:
        """Number of spatial axes that the operation's name says: 2 for `aten.conv2d.default`."""
        (digit,) = re.findall(r"(\d)d\b", self.node.target)
        return int(digit)

    def per_axis(self, name: str, default: int) -> tuple[int, ...]:
        """Return an argument that has a number for each spatial axis; one integer stands for all of them.

        Raises:
            Refused: There is another number of integers.
        """
        numbers = self.ints(name) or (default,)
        numbers = numbers * self.rank if len(numbers) == 1 else numbers
        if len(numbers) != self.rank:
            raise Refused(f"its '{name}' has {len(numbers)} numbers", f"give one for each of {self.rank} axes")
        return numbers

    def _number(self, name: str, default: float) -> float:
        """Return an argument that is a number, or `default` if it is left out.

        Raises:
            Refused: The number depends on data.
        """
        value = self.argument(name)
        if value is None:
            return default
        if isinstance(value, Opaque) or not isinstance(value, int | float):
            raise Refused(f"its '{name}' is not known before it runs", "export it with a fixed number")
        return value

    def ignore(self, *names: str) -> None:
        """Mark arguments as read that do not change the result of this call."""
        self._read.update(names)

    def shape_said_by(self, *names: str) -> tuple[int, ...]:
        """Return the shape of the first result, and mark the arguments as read that determine only this shape."""
        self._read.update(names)
        return self.result_shape

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of the first output, as the program states it."""
        return self._builder.meta(self.node.outputs[0]).sizes

    @property
    def result_dtype(self) -> str:
        """The type of the first output, as the program states it."""
        return self._builder.meta(self.node.outputs[0]).dtype

    def dtype_of(self, name: str) -> str:
        """Return the type of an argument that is a tensor, as the program states it.

        Raises:
            Refused: The argument is no tensor.
        """
        value = self.argument(name)
        if not isinstance(value, TensorName):
            raise Refused(f"its argument '{name}' is no tensor", "give it a tensor")
        return self._builder.meta(value.name).dtype

    def array(self, weight: Weight) -> Array:
        """Return the numbers of a parameter, buffer or constant."""
        return self._builder.array(weight.held)

    def claim(self, noise: Noise) -> None:
        """Claim a random mask for one layer: because each layer draws its own random numbers, no second one may use it.

        Raises:
            Refused: The mask was used before.
        """
        if not self._builder.claim(noise.source):
            raise Refused("it uses one random mask twice", "draw a mask for each use, or multiply once")

    @property
    def is_training(self) -> bool:
        """True if the model is in training mode, or a part of it is."""
        return self._builder.is_training()

    # ---- results ----

    def layer(
        self,
        op: str,
        inputs: Activation | Sequence[Activation],
        shape: tuple[int, ...],
        settings: Mapping[str, Setting] | None = None,
        **states: Weight | tuple[Weight, tuple[int, ...]] | None,
    ) -> Activation:
        """Add a layer to the network and return its result.

        Args:
            op: The layer's name in the language.
            inputs: The tensors that the layer takes.
            shape: The shape of the result.
            settings: The layer's settings.
            **states: The layer's parameters and buffers; None for a state that the layer does not have. A pair gives
                the shape that the network has for a parameter, if it differs from PyTorch's.

        Returns:
            The result, of the shape `shape`.
        """
        if op == "reshape" and len(shape) == 1:  # one number for each sample
            op, settings = "squeeze", {}
        given = {n: (s if isinstance(s, tuple) else (s, s.shape)) for n, s in states.items() if s is not None}
        values = (inputs,) if isinstance(inputs, Activation) else inputs
        return self._builder.step(op, [a.value for a in values], [shape], settings or {}, given, self.node)[0]

    def parts(
        self, op: str, x: Activation, shapes: Sequence[tuple[int, ...]], settings: Mapping[str, Setting]
    ) -> tuple[Activation, ...]:
        """Return the results of a new layer that gives several tensors."""
        return self._builder.step(op, [x.value], shapes, settings, {}, self.node)

    def tensor(self, weight: Weight, shape: tuple[int, ...]) -> Activation:
        """Return a parameter or buffer as a tensor of the network, without a dimension for samples."""
        op = "parameter" if weight.held.kind == "parameter" else "constant"
        sizes: Setting = shape[0] if len(shape) == 1 else shape
        states = {"": (weight, shape)}
        return self._builder.step(op, [], [shape], {"shape": sizes}, states, self.node)[0]

    def held(self, numbers: Known, shape: tuple[int, ...]) -> Weight:
        """Return numbers as a constant of the network that is combined with a tensor of the shape `shape`.

        Raises:
            Refused: The numbers differ between samples, are not finite, or are elements of a parameter.
        """
        array = numbers.array
        if numbers.weight is not None:
            refuse_calculation(numbers.weight)
        if len(array.shape) == len(shape) and array.shape[0] != 1:
            if not (array == array[:1]).all():
                raise Refused("it takes different numbers for each sample", "give all samples the same numbers")
            array = array[:1]
        array = np.ascontiguousarray(array, np.float64)
        if not (np.abs(array) <= np.finfo(np.float32).max).all():
            raise Refused("it computes with numbers that are not finite", "use finite numbers")
        return Weight(self._builder.hold(array), array.shape)

    def maker(self, x: Activation) -> tuple[Step, Activation] | None:
        """Return the step that gave a tensor, and the step's first input; None for inputs of the network."""
        origin = self._builder.maker(x.value)
        return None if origin is None else (origin[0], Activation(origin[0].values[0], origin[1]))

    def elementwise(self, op: str, x: Activation, settings: Mapping[str, Setting] | None = None) -> Activation:
        """Return the result of a layer that treats each element by itself; the result keeps the view."""
        if isinstance(x.view, Padded):
            x = self.settle(x)
        elif isinstance(x.view, Factored):
            x = picked(self, x)
        return replace(self.layer(op, x, x.shape, settings), view=x.view)

    def along(self, x: Activation, dim: int) -> tuple[Activation, int]:
        """Return a tensor and its axis for the dimension `dim` of the program.

        A tensor that is viewed with the channels last is not moved.

        Raises:
            Refused: The dimension is 0, the samples.
        """
        dim %= len(x.seen)
        if dim == 0:
            raise Refused("it works along dimension 0, the samples", "keep the samples of a mini-batch apart")
        if x.view is CHANNELS_LAST:
            return x, (*range(2, len(x.shape)), 1)[dim - 1]
        return self.settle(x), dim

    def operator(self, op: str, a: Activation | float, b: Activation | float, shape: tuple[int, ...]) -> Activation:
        """Return the result of an operator (`+ - * /`), or of a layer of two tensors with the settings of this call."""
        operands = [x.value if isinstance(x, Activation) else Number(float(x)) for x in (a, b)]
        return self._builder.step(op, operands, [shape], self._settings, {}, self.node)[0]

    def image(self, x: Activation) -> Activation:
        """Return a tensor with its windows joined if the program views them as an image."""
        return as_image(self, x)

    def settle(self, x: Activation) -> Activation:
        """Return the tensor in the shape that the program sees; a repeated tensor is added to zeros.

        Raises:
            Refused: The repeated tensor is too large.
        """
        if x.view is FLAT:
            return self.layer("flatten", x, x.seen)
        if x.view is CHANNELS_LAST:
            rank = len(x.shape)
            return self.layer("permute", x, x.seen, {"axes": (0, *range(2, rank), 1)})
        if isinstance(x.view, Padded):
            return self.layer("padding", x, x.seen, {"pad": as_setting(x.view.pad), "value": x.view.value})
        if x.view is GATE:
            return self.layer("reshape", x, x.seen, {"sizes": x.seen[1:]})
        if isinstance(x.view, Factored):
            return settled(self, x)
        if isinstance(x.view, Expanded):
            if math.prod(x.seen[1:]) > MOST_NUMBERS:
                raise Refused(
                    f"it repeats {list(x.shape)} to {list(x.seen)}",
                    "repeat it in the operation that takes it, such as x + y",
                )
            sizes = tuple(1 if own == wide else wide for own, wide in zip(x.shape, x.seen, strict=True))
            zeros = self.tensor(self.held(Known(np.zeros(sizes)), x.seen), sizes)
            return self.operator("+", Activation(x.value, x.shape), zeros, x.seen)
        return x


def _is_default(value: Argument, parameter: Parameter) -> bool:
    """Return True if an argument cannot change the result: it is the schema's default, or only places the bytes."""
    if parameter.type.rstrip("?") in _PLACEMENT or parameter.name in _PLACEMENT_FLAGS:
        return True
    default = parameter.default
    if isinstance(default, Required):
        return False
    if isinstance(value, tuple) and isinstance(default, int | float):
        return all(item == default for item in value)  # one number stands for all axes
    return value == default


def _shown(value: Argument) -> str:
    if isinstance(value, TensorName):
        return "a tensor"
    return value.what if isinstance(value, Opaque) else str(list(value) if isinstance(value, tuple) else value)


Rule = Callable[[Call], Result]


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
        what = "parameter" if operand.held.kind == "parameter" else operand.held.kind
        raise Refused(f"it takes the {what} '{operand.held.key}' as a tensor", "use it in a layer of torch.nn")
    if isinstance(operand, Scaled | Standardized):
        refuse_calculation(operand.weight)
    if isinstance(operand, Computed):
        raise Refused("it takes a tensor computed from parameters alone", "add it to a tensor of the network first")
    if isinstance(operand, Known):
        raise Refused("it takes numbers that do not depend on the input", "hold them as a parameter or buffer")
    if isinstance(operand, Scores):
        raise Refused("it takes the scores of attention", "use torch.nn.functional.scaled_dot_product_attention")
    raise Refused("it takes random numbers", "use torch.nn.Dropout or stochastic depth of whole samples")
