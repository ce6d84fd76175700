"""The call that a rule of an ATen operation receives: arguments, layers, and tensors in the shapes of the program.

A family of rules is a file of this folder with a table `RULES`. The table maps the name of an operation to a function
that takes a `Call` and returns the operation's result. An operation that works in place has the name without the
trailing `_`. `NOT_TAKEN` names operations for which the language has no layer, with a remedy.

`node_arguments` and `written_layers` have the methods of a call that do not depend on the program's view of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

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
    as_activation,
    as_setting,
)
from mbc.interchange.aten.written_layers import Layers
from mbc.interchange.steps import Setting

MOST_NUMBERS = 1 << 26  # largest constant that an import computes: 256 MiB


class Call(Layers):
    """One node of the program: its arguments, the layers that replace it, and the views that these layers need."""

    def with_settings(self, settings: Mapping[str, Setting]) -> Call:
        """Return a call whose operators are layers with these settings."""
        call = Call(self.node, self._builder)
        call._read, call._settings = self._read, settings
        return call

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
        return self.settle(self.operand(name))

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

    def image(self, x: Activation) -> Activation:
        """Return a tensor with its windows joined if the program views them as an image."""
        return as_image(self, x)

    def settle(self, operand: Operand) -> Activation:
        """Return an operand as a tensor in the shape that the program sees; a repeated tensor is added to zeros.

        Raises:
            Refused: The repeated tensor is too large, or the operand is no tensor of the network (`as_activation`).
        """
        x = as_activation(operand)
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


Rule = Callable[[Call], Result]
