"""What a rule of an ATen operation is given, and what it gives.

A family of rules is a file of this folder with a table `RULES`: the name of an operation, without its trailing `_`
where it works in place, to a function that takes a `Call` and gives the operation's result. `NOT_TAKEN` names
operations for which the language has nothing yet, with what would do instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

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
    """What rules write themselves into; `mbc.interchange.builder` implements it."""

    def operand(self, name: str) -> Operand: ...

    def meta(self, name: str) -> TensorMeta: ...

    def array(self, held: Held) -> Array: ...

    def step(
        self,
        op: str,
        inputs: Sequence[int | Number],
        shapes: Sequence[tuple[int, ...]],
        settings: Mapping[str, Setting],
        states: Mapping[str, tuple[Weight, tuple[int, ...]]],
        node: Node,
    ) -> tuple[Activation, ...]: ...

    def maker(self, value: int) -> tuple[Step, tuple[int, ...]] | None: ...

    def claim(self, source: str) -> bool: ...

    def hold(self, array: Array) -> Held: ...


MOST_NUMBERS = 1 << 26  # of a constant that an import computes: 256 MiB
# Where bytes lie, which library computes, and the type of a result, which is checked for every node: no rule reads
# these.
_PLACEMENT = frozenset(("ScalarType", "Layout", "Device", "MemoryFormat", "Generator"))
_PLACEMENT_FLAGS = frozenset(("pin_memory", "non_blocking", "copy", "cudnn_enabled", "cudnn_enable", "implicit"))


class Call:
    """One node of the program, its arguments by their names in ATen's schema.

    A rule reads every argument that may change the result: `check_all_read` refuses the others.
    """

    def __init__(self, node: Node, builder: Builder) -> None:
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
        """Return an argument as it is written; None where it is left out."""
        self._read.add(name)
        return self.node.arguments.get(name)

    def check_all_read(self) -> None:
        """Raise Refused for an argument that the rule has not read, and that differs from its schema's default."""
        schema = schema_of(self.node.target)
        parameters = {} if schema is None else {p.name: p for p in schema.parameters}
        for name, value in self.node.arguments.items():
            parameter = parameters.get(name)
            if name in self._read or (parameter is not None and _is_default(value, parameter)):
                continue
            raise Refused(f"its argument '{name}' is {_shown(value)}, which is not taken", "leave this argument out")

    def operand(self, name: str) -> Operand:
        """Return a tensor. Raises Refused where a number stands there."""
        value = self.argument(name)
        if not isinstance(value, TensorName):
            raise Refused(f"its argument '{name}' is no tensor", "write it with a tensor")
        return self._operand(value)

    def _operand(self, name: TensorName) -> Operand:
        operand = self._builder.operand(name.name)
        if isinstance(operand, Untaken):
            raise Refused(operand.reason, operand.remedy)
        return operand

    def optional(self, name: str) -> Operand | None:
        return None if self.argument(name) is None else self.operand(name)

    def operands(self, name: str) -> tuple[Operand, ...]:
        """Return a list of tensors."""
        return tuple(operand for operand in self.optional_operands(name) if operand is not None)

    def optional_operands(self, name: str) -> tuple[Operand | None, ...]:
        """Return a list of tensors, some of which are left out."""
        value = self.argument(name)
        items = value if isinstance(value, tuple) else ()
        return tuple(self._operand(item) if isinstance(item, TensorName) else None for item in items)

    def is_tensor(self, name: str) -> bool:
        return isinstance(self.node.arguments.get(name), TensorName)

    def lazy(self, name: str) -> Activation:
        """Return a tensor of the network as the program regards it, with work that may still be pending."""
        return as_activation(self.operand(name))

    def activation(self, name: str) -> Activation:
        """Return a tensor of the network with nothing pending: its elements are those of its value, in some order."""
        x = self.lazy(name)
        if isinstance(x.view, Padded | Expanded):
            return self.settle(x)
        return picked(self, x) if x.is_pending else x

    def plain(self, name: str) -> Activation:
        """Return a tensor of the network in the shape that the program sees."""
        return self.settle(self.lazy(name))

    def weight(self, name: str) -> Weight:
        found = self.operand(name)
        if not isinstance(found, Weight):
            raise Refused(f"its {name} is computed, not a parameter", "hold it as a parameter of the module")
        return found

    def optional_weight(self, name: str) -> Weight | None:
        return None if self.argument(name) is None else self.weight(name)

    def integer(self, name: str, default: int) -> int:
        return int(self._number(name, default))

    def real(self, name: str, default: float) -> float:
        return float(self._number(name, default))

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._number(name, default))

    def text(self, name: str, default: str) -> str:
        value = self.argument(name)
        return value if isinstance(value, str) else default

    def ints(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
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

    def pair(self, name: str, default: int) -> tuple[int, int]:
        found = list(self.ints(name)) or [default]
        if len(found) > 2:
            raise Refused(f"its '{name}' has {len(found)} dimensions", "images have two dimensions here")
        return (found[0], found[1]) if len(found) == 2 else (found[0], found[0])

    def _number(self, name: str, default: float) -> float:
        value = self.argument(name)
        if value is None:
            return default
        if isinstance(value, Opaque) or not isinstance(value, int | float):
            raise Refused(f"its '{name}' is not known before it runs", "export it with a fixed number")
        return value

    def ignore(self, *names: str) -> None:
        """Enter arguments as read that change nothing where the rule calls this."""
        self._read.update(names)

    def shape_said_by(self, *names: str) -> tuple[int, ...]:
        """Return the shape of the first result, which these arguments say and nothing beside it."""
        self._read.update(names)
        return self.result_shape

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape that the program says the first output has."""
        return self._builder.meta(self.node.outputs[0]).sizes

    @property
    def result_dtype(self) -> str:
        """The type that the program says the first output has."""
        return self._builder.meta(self.node.outputs[0]).dtype

    def dtype_of(self, name: str) -> str:
        """Return the type that the program says a tensor has."""
        value = self.argument(name)
        if not isinstance(value, TensorName):
            raise Refused(f"its argument '{name}' is no tensor", "write it with a tensor")
        return self._builder.meta(value.name).dtype

    def array(self, weight: Weight) -> Array:
        return self._builder.array(weight.held)

    def claim(self, noise: Noise) -> None:
        """Use a random mask. Raises Refused at its second use: each layer draws random numbers of its own."""
        if not self._builder.claim(noise.source):
            raise Refused("it uses one random mask twice", "draw a mask for each use, or multiply once")

    # ---- results ----

    def layer(
        self,
        op: str,
        inputs: Activation | Sequence[Activation],
        shape: tuple[int, ...],
        settings: Mapping[str, Setting] | None = None,
        **states: Weight | tuple[Weight, tuple[int, ...]] | None,
    ) -> Activation:
        """A layer of the language that gives `shape`. `states`: its parameters, each with the shape that the network
        has for it where that is not torch's; None: it has none."""
        if op == "reshape" and len(shape) == 1:  # one number a row
            op, settings = "squeeze", {}
        given = {n: (s if isinstance(s, tuple) else (s, s.shape)) for n, s in states.items() if s is not None}
        values = (inputs,) if isinstance(inputs, Activation) else inputs
        return self._builder.step(op, [a.value for a in values], [shape], settings or {}, given, self.node)[0]

    def parts(
        self, op: str, x: Activation, shapes: Sequence[tuple[int, ...]], settings: Mapping[str, Setting]
    ) -> tuple[Activation, ...]:
        """A layer that gives several tensors."""
        return self._builder.step(op, [x.value], shapes, settings, {}, self.node)

    def tensor(self, weight: Weight, shape: tuple[int, ...]) -> Activation:
        """A parameter or buffer as a tensor of its own, without rows."""
        op = "parameter" if weight.held.kind == "parameter" else "constant"
        sizes: Setting = shape[0] if len(shape) == 1 else shape
        states = {"": (weight, shape)}
        return self._builder.step(op, [], [shape], {"shape": sizes}, states, self.node)[0]

    def held(self, numbers: Known, shape: tuple[int, ...]) -> Weight:
        """Return numbers that are to be combined with a tensor of `shape` as a constant of the network.

        Raises Refused for numbers that are not the same for all samples.
        """
        array = numbers.array
        if numbers.weight is not None:
            raise calculated(numbers.weight)
        if len(array.shape) == len(shape) and array.shape[0] != 1:
            if not (array == array[:1]).all():
                raise Refused("it takes other numbers for each sample", "give all samples the same numbers")
            array = array[:1]
        array = np.ascontiguousarray(array, np.float64)
        if not (np.abs(array) <= np.finfo(np.float32).max).all():
            raise Refused("it computes with numbers that are not finite", "use finite numbers")
        return Weight(self._builder.hold(array), array.shape)

    def maker(self, x: Activation) -> tuple[Step, Activation] | None:
        """The step that gave a tensor, and the first tensor that it took. None for inputs of the network."""
        found = self._builder.maker(x.value)
        return None if found is None else (found[0], Activation(found[0].values[0], found[1]))

    def elementwise(self, op: str, x: Activation, settings: Mapping[str, Setting] | None = None) -> Activation:
        """Return a layer that works on each element by itself, however the tensor is regarded."""
        if isinstance(x.view, Padded):
            x = self.settle(x)
        elif isinstance(x.view, Factored):
            x = picked(self, x)
        return replace(self.layer(op, x, x.shape, settings), view=x.view)

    def along(self, x: Activation, dim: int) -> tuple[Activation, int]:
        """A tensor and its axis for what the program calls `dim`; channels that it regards as the last stay where they
        are. Raises Refused for axis 0, the samples."""
        dim %= len(x.seen)
        if dim == 0:
            raise Refused("it works along dimension 0, the samples", "keep the samples of a mini-batch apart")
        if x.view is CHANNELS_LAST:
            return x, (*range(2, len(x.shape)), 1)[dim - 1]
        return self.settle(x), dim

    def operator(self, op: str, a: Activation | float, b: Activation | float, shape: tuple[int, ...]) -> Activation:
        operands = [x.value if isinstance(x, Activation) else Number(float(x)) for x in (a, b)]
        return self._builder.step(op, operands, [shape], self._settings, {}, self.node)[0]

    def image(self, x: Activation) -> Activation:
        """A tensor whose windows, if it has them, are joined where the program regards them so."""
        return as_image(self, x)

    def settle(self, x: Activation) -> Activation:
        """Return the tensor in the shape that the program sees. What is repeated is added to zeros."""
        if x.view is FLAT:
            return self.layer("flatten", x, x.seen)
        if x.view is CHANNELS_LAST:
            rank = len(x.shape)
            return self.layer("permute", x, x.seen, {"axes": (0, *range(2, rank), 1)})
        if isinstance(x.view, Padded):
            if x.view.value:
                raise Refused(f"it takes what {x.view.value:g} was padded around", "pad so before max pooling alone")
            return self.layer("padding", x, x.seen, {"pad": as_setting(x.view.pad)})
        if x.view is GATE:
            return self.layer("reshape", x, x.seen, {"sizes": x.seen[1:]})
        if isinstance(x.view, Factored):
            return settled(self, x)
        if isinstance(x.view, Expanded):
            if math.prod(x.seen[1:]) > MOST_NUMBERS:
                raise Refused(f"it repeats {list(x.shape)} to {list(x.seen)}", "combine it with what is as large")
            sizes = tuple(1 if own == wide else wide for own, wide in zip(x.shape, x.seen, strict=True))
            zeros = self.tensor(self.held(Known(np.zeros(sizes)), x.seen), sizes)
            return self.operator("+", Activation(x.value, x.shape), zeros, x.seen)
        return x


def _is_default(value: Argument, parameter: Parameter) -> bool:
    """Whether an argument says nothing that changes the result: its schema's default, or where the bytes lie."""
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


def calculated(weight: Weight) -> Refused:
    """Of a parameter that is computed with where no layer does so by itself."""
    return Refused(
        f"it calculates with the {weight.held.kind} '{weight.held.key}' before a layer takes it",
        "hold what is computed as a parameter, and use it in a layer or with a tensor of the network",
    )


def as_activation(operand: Operand) -> Activation:
    """Raises Refused for parameters and random numbers, which no operation but a few takes."""
    if isinstance(operand, Activation):
        return operand
    if isinstance(operand, Weight):
        what = "parameter" if operand.held.kind == "parameter" else operand.held.kind
        raise Refused(f"it takes the {what} '{operand.held.key}' as a tensor", "use it in a layer of torch.nn")
    if isinstance(operand, Scaled | Standardized):
        raise calculated(operand.weight)
    if isinstance(operand, Computed):
        raise Refused("it takes what is computed of parameters alone", "add it to a tensor of the network first")
    if isinstance(operand, Known):
        raise Refused("it takes numbers that do not depend on the input", "hold them as a parameter or buffer")
    if isinstance(operand, Scores):
        raise Refused("it takes the scores of attention", "use torch.nn.functional.scaled_dot_product_attention")
    raise Refused("it takes random numbers", "use torch.nn.Dropout or stochastic depth of whole samples")
