"""A network between torch and the language: what a source will say, step by step, before it has blocks and names."""

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
    """An operand of an operator that is no tensor."""

    value: float


@dataclass(frozen=True, slots=True)
class StateOf:
    """A parameter or statistic of a step: `<label>.<suffix>` of the network (`<label>` alone for free parameters, whose
    suffix is empty) holds the tensor `key` of the `state_dict`, in the shape that the network has for it."""

    suffix: str
    key: str
    shape: tuple[int, ...]

    def name(self, label: str) -> str:
        """Of the network's state, for the layer of this label."""
        return f"{label}.{self.suffix}" if self.suffix else label


@dataclass(frozen=True, slots=True)
class Step:
    """One layer or operator. `inputs`, `results`: values by number; `settings`: those that differ from the language's
    defaults; `label`: the path of the layer's parameters, empty where it has none. `modules`: the calls it was
    made in."""

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
    """A key of the `state_dict`: the state of the network that holds it (empty where none does), and its own shape and
    type. Where no state does, `kept` is the key under which its numbers are kept, and `per_update` is what each update
    adds to them: `num_batches_tracked` counts the calls of its layer."""

    name: str
    state: str
    shape: tuple[int, ...]
    dtype: str
    kept: str = ""
    per_update: int = 0


@dataclass(frozen=True, slots=True)
class Imported:
    """A network that was imported. `inputs`: name, shape; values 0, 1, … are they. `arrays`: what states begin with, by
    name; `kept`: tensors of the `state_dict` that the network does not have. `frozen`: states that are not trained."""

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
        """Whether there is a parameter to train."""
        names = {s.name(step.label) for step in self.steps if step.op != "constant" for s in step.states}
        return any(name.rpartition(".")[2] not in STATISTICS for name in names - set(self.frozen))


_NO_NAME = re.compile(r"[^A-Za-z0-9_]")


def label_of(path: str) -> str:
    """A path of modules as a label: parts of letters, digits and `_`."""
    return ".".join(_NO_NAME.sub("_", part) or "_" for part in path.split("."))
