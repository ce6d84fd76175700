"""A network between PyTorch and the language: the source's statements, before it has blocks and names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mbc.interchange.program import Array, ModuleCall

Setting = int | float | bool | str | tuple[int | float, ...]

OPERATORS = frozenset("+-*/")
STATISTICS = frozenset(("running_mean", "running_var"))


@dataclass(frozen=True, slots=True)
class Number:
    """An operand of an operator that is a number."""

    value: float


@dataclass(frozen=True, slots=True)
class StateOf:
    """A parameter or statistic of a step.

    The network's state `<label>.<suffix>` holds the tensor `key` of the `state_dict`, in the shape that the network has
    for it. A free parameter has no suffix, and its state is called `<label>`.
    """

    suffix: str
    key: str
    shape: tuple[int, ...]

    def name(self, label: str) -> str:
        """Return the name of the network's state, for a layer with this label."""
        return f"{label}.{self.suffix}" if self.suffix else label


@dataclass(frozen=True, slots=True)
class Step:
    """One layer or operator.

    Attributes:
        op: The layer's or operator's name in the language.
        inputs: Value numbers, and numbers that stand in the source.
        results: Value numbers.
        settings: The settings that differ from the language's defaults.
        label: The path of the layer's parameters; empty if it has none.
        states: The layer's parameters and statistics.
        modules: The module calls around the step.
    """

    op: str
    inputs: tuple[int | Number, ...]
    results: tuple[int, ...]
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    label: str = ""
    states: tuple[StateOf, ...] = ()
    modules: tuple[ModuleCall, ...] = ()

    @property
    def values(self) -> tuple[int, ...]:
        """The inputs that are tensors."""
        return tuple(value for value in self.inputs if not isinstance(value, Number))


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the `state_dict`, with its own shape and type.

    Attributes:
        name: The key.
        state: The state of the network that holds the numbers; empty if there is none.
        shape: The shape in the `state_dict`.
        dtype: The type in the `state_dict`.
        kept: Without a state, the key under which the numbers are stored.
        per_update: Without a state, the number that each update adds: `num_batches_tracked` counts the calls of its
            layer.
    """

    name: str
    state: str
    shape: tuple[int, ...]
    dtype: str
    kept: str = ""
    per_update: int = 0


@dataclass(frozen=True, slots=True)
class Imported:
    """An imported network.

    Attributes:
        name: The network's name.
        inputs: Name and shape of each input; input n is value n.
        steps: The layers and operators, in order.
        outputs: The values that are outputs.
        shapes: The shape of each value.
        keys: All keys of the `state_dict`.
        arrays: The initial numbers of states, by name.
        kept: Tensors of the `state_dict` that the network does not have.
        frozen: The states that are not trained.
        writer: The program that wrote the file.
    """

    name: str
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    shapes: Mapping[int, tuple[int, ...]]
    keys: tuple[Key, ...]
    arrays: Mapping[str, Array]
    kept: Mapping[str, Array]
    frozen: tuple[str, ...]
    writer: str

    @property
    def trained(self) -> bool:
        """True if there is a parameter to train."""
        names = {s.name(step.label) for step in self.steps if step.op != "constant" for s in step.states}
        return any(name.rpartition(".")[2] not in STATISTICS for name in names - set(self.frozen))


_NO_NAME = re.compile(r"[^A-Za-z0-9_]")


def label_of(path: str) -> str:
    """Return a path of modules as a label, whose parts have letters, digits and `_` only."""
    return ".".join(_NO_NAME.sub("_", part) or "_" for part in path.split("."))
