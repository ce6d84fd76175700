"""The layers that a rule writes in place of a node of the program.

Tensors are taken as they are stored, whatever the program's view of them is. These methods stand alone because
`factors` writes the layers of views with them, and `base` needs `factors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from mbc.interchange.aten.node_arguments import Arguments, Tensors
from mbc.interchange.aten.operands import Activation, Known, Noise, Refused, Weight, refuse_calculation
from mbc.interchange.program import Array, Held, Node
from mbc.interchange.steps import Number, Setting, Step


class Builder(Tensors, Protocol):
    """The network that rules write layers into; `mbc.interchange.builder` implements it."""

    def array(self, held: Held) -> Array:
        """Return the numbers of a parameter, buffer or constant."""
        ...

    def step(
        self, op: str, inputs: Sequence[int | Number], shapes: Sequence[tuple[int, ...]],
        settings: Mapping[str, Setting], states: Mapping[str, tuple[Weight, tuple[int, ...]]], node: Node,
    ) -> tuple[Activation, ...]:  # fmt: skip
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


class Layers(Arguments):
    """A node of the program, and the network into which its layers are written."""

    def __init__(self, node: Node, builder: Builder) -> None:
        """Take a node, and the network that is built."""
        super().__init__(node, builder)
        self._builder = builder
        self._settings: Mapping[str, Setting] = {}

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

    def layer(
        self, op: str, inputs: Activation | Sequence[Activation], shape: tuple[int, ...],
        settings: Mapping[str, Setting] | None = None, **states: Weight | tuple[Weight, tuple[int, ...]] | None,
    ) -> Activation:  # fmt: skip
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

    def operator(self, op: str, a: Activation | float, b: Activation | float, shape: tuple[int, ...]) -> Activation:
        """Return the result of an operator (`+ - * /`), or of a layer of two tensors with the settings of this call."""
        operands = [x.value if isinstance(x, Activation) else Number(float(x)) for x in (a, b)]
        return self._builder.step(op, operands, [shape], self._settings, {}, self.node)[0]
