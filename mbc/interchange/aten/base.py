"""What a rule of an ATen operation is given, and what it gives.

A family of rules is a file of this folder with a table `RULES`: the name of an operation, without its trailing `_`
where it works in place, to a function that takes a `Call` and gives the operation's result. `NOT_TAKEN` names
operations for which the language has nothing yet, with what would do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from mbc.interchange.aten.factors import as_image, picked, settled
from mbc.interchange.aten.operands import (
    CHANNELS_LAST,
    FLAT,
    GATE,
    Activation,
    Expanded,
    Factored,
    Known,
    Operand,
    Padded,
    Refused,
    Result,
    Scaled,
    Scores,
    Standardized,
    Weight,
    as_setting,
)
from mbc.interchange.program import Array, Held, Node, Opaque, TensorMeta, TensorName
from mbc.interchange.steps import Number, Setting, Step


class Builder(Protocol):
    """What rules write themselves into; `mbc.interchange.translate` implements it."""

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


class Call:
    """One node of the program, its arguments by their names in ATen's schema."""

    def __init__(self, node: Node, builder: Builder) -> None:
        self.node = node
        self._builder = builder

    # ---- arguments ----

    def operand(self, name: str) -> Operand:
        """A tensor. Raises Refused where a number stands there."""
        value = self.node.arguments.get(name)
        if not isinstance(value, TensorName):
            raise Refused(f"its argument '{name}' is no tensor", "write it with a tensor")
        return self._builder.operand(value.name)

    def optional(self, name: str) -> Operand | None:
        return None if self.node.arguments.get(name) is None else self.operand(name)

    def operands(self, name: str) -> tuple[Operand, ...]:
        """A list of tensors."""
        value = self.node.arguments.get(name)
        items = value if isinstance(value, tuple) else ()
        return tuple(self._builder.operand(item.name) for item in items if isinstance(item, TensorName))

    def optional_operands(self, name: str) -> tuple[Operand | None, ...]:
        """A list of tensors, some of which are left out."""
        value = self.node.arguments.get(name)
        items = value if isinstance(value, tuple) else ()
        return tuple(self._builder.operand(item.name) if isinstance(item, TensorName) else None for item in items)

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
        return None if self.node.arguments.get(name) is None else self.weight(name)

    def integer(self, name: str, default: int) -> int:
        return int(self._number(name, default))

    def real(self, name: str, default: float) -> float:
        return float(self._number(name, default))

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._number(name, default))

    def text(self, name: str, default: str) -> str:
        value = self.node.arguments.get(name, default)
        return value if isinstance(value, str) else default

    def ints(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        value = self.node.arguments.get(name, default)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,)
        if not isinstance(value, tuple) or not all(isinstance(item, int) for item in value):
            raise Refused(f"its '{name}' is not known before it runs", "export it with fixed sizes")
        return tuple(item for item in value if isinstance(item, int))

    def pair(self, name: str, default: int) -> tuple[int, int]:
        found = list(self.ints(name)) or [default]
        if len(found) > 2:
            raise Refused(f"its '{name}' has {len(found)} dimensions", "images have two dimensions here")
        return (found[0], found[1]) if len(found) == 2 else (found[0], found[0])

    def _number(self, name: str, default: float) -> float:
        value = self.node.arguments.get(name)
        if value is None:
            return default
        if isinstance(value, Opaque) or not isinstance(value, int | float):
            raise Refused(f"its '{name}' is not known before it runs", "export it with a fixed number")
        return value

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape that the program says the first output has."""
        return self._builder.meta(self.node.outputs[0]).sizes

    def array(self, weight: Weight) -> Array:
        return self._builder.array(weight.held)

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
        return self._builder.step(op, operands, [shape], {}, {}, self.node)[0]

    def image(self, x: Activation) -> Activation:
        """A tensor whose windows, if it has them, are joined where the program regards them so."""
        return as_image(self, x)

    def settle(self, x: Activation) -> Activation:
        """Return the tensor in the shape that the program sees. Raises Refused for one that is repeated."""
        if x.view is FLAT:
            return self.layer("flatten", x, x.seen)
        if x.view is CHANNELS_LAST:
            rank = len(x.shape)
            return self.layer("permute", x, x.seen, {"axes": (0, *range(2, rank), 1)})
        if isinstance(x.view, Padded):
            return self.layer("padding", x, x.seen, {"pad": as_setting(x.view.pad)})
        if x.view is GATE:
            return self.layer("reshape", x, x.seen, {"sizes": x.seen[1:]})
        if isinstance(x.view, Factored):
            return settled(self, x)
        if isinstance(x.view, Expanded):
            raise Refused(
                f"it needs {list(x.shape)} repeated to {list(x.seen)}", "leave expand out: + - * / repeat by themselves"
            )
        return x


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
    if isinstance(operand, Known):
        raise Refused("it takes numbers that do not depend on the input", "hold them as a parameter or buffer")
    if isinstance(operand, Scores):
        raise Refused("it takes the scores of attention", "use torch.nn.functional.scaled_dot_product_attention")
    raise Refused("it takes random numbers", "use torch.nn.Dropout or stochastic depth of whole samples")
