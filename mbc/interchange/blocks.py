"""Blocks of the language for repeated groups of steps. Parameters express the differences between their uses."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mbc.interchange.modules import Group, below, skeletons
from mbc.interchange.source_names import reserved
from mbc.interchange.steps import OPERATORS, Imported, Number, Setting, Step
from mbc.ops import LAYERS
from mbc.ops import base as ops

_CHANNELS = "x.shape[1]"
_FACTORS = range(2, 9)
_COUNTS = ("channels", "features", "groups", "shape")


@dataclass(frozen=True, slots=True)
class Word:
    """A setting that is a layer, such as `act = relu`."""

    text: str


Value = Setting | Word


@dataclass(frozen=True, slots=True)
class Item:
    """One stage of a body: an operator (`+`), or a layer or block with its settings and label."""

    text: str
    inputs: tuple[int | Number, ...]
    results: tuple[int, ...]
    label: str = ""
    module: str = ""  # the outermost module; a body of many stages may be cut where it ends


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a block, with its default if it has one."""

    name: str
    default: Value | None


@dataclass
class Block:
    """The definition of a block: the body of its first use, and the arguments of each use by parameter."""

    name: str
    parameters: tuple[Parameter, ...] = ()
    uses_channels: bool = False
    body: tuple[Item, ...] = ()
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    arguments: dict[Group, dict[str, Value]] = field(default_factory=dict[Group, dict[str, Value]])


def find_blocks(network: Imported, root: Group, free: Callable[[str], str]) -> tuple[list[Block], Block]:
    """Return the blocks of a network, each after the blocks that it uses, and the network's body.

    Args:
        network: The imported network.
        root: The tree of its module calls.
        free: Returns an unused name, made from the name that is wanted.
    """
    return _Blocks(network, root, free).all()


class _Blocks:
    def __init__(self, network: Imported, root: Group, free: Callable[[str], str]) -> None:
        self._network = network
        self._root = root
        self._free = free
        self._keys = skeletons(root)
        self._groups: dict[object, list[Group]] = defaultdict(list)
        for group in _all_groups(root):
            if group.closed:
                self._groups[self._keys[group]].append(group)
        self._chosen = self._choose()
        self._blocks: dict[object, Block] = {}

    def all(self) -> tuple[list[Block], Block]:
        order = sorted(self._chosen, key=lambda key: sum(1 for _ in self._groups[key][0].steps()))
        for key in order:
            uses = self._groups[key]
            self._blocks[key] = self._define(self._free(_block_name(uses[0])), uses)
        return [self._blocks[key] for key in order], self._define(self._network.name, [self._root])

    def _choose(self) -> list[object]:
        """Return the groups that would otherwise be written more than once in the source."""
        chosen = [key for key, groups in self._groups.items() if len(groups) > 1]
        while True:
            bodies = [self._root, *(self._groups[key][0] for key in chosen)]
            written = [self._keys[g] for body in bodies for g in self._parts(body, chosen) if isinstance(g, Group)]
            kept = [key for key in chosen if written.count(key) > 1]
            if len(kept) == len(chosen):
                return chosen
            chosen = kept

    def _parts(self, group: Group, chosen: Sequence[object]) -> Iterator[Step | Group]:
        """Yield the steps and the uses of blocks in a body.

        Yields:
            A step, or a group that is a use of a chosen block.
        """
        for item in group.items:
            if isinstance(item, Group) and self._keys[item] not in chosen:
                yield from self._parts(item, chosen)
            else:
                yield item

    def _define(self, name: str, uses: Sequence[Group]) -> Block:
        """Return the definition of a block that has these uses."""
        parts = [list(self._parts(group, self._chosen)) for group in uses]
        channels = [self._network.shapes[group.inputs[0]][1:2] for group in uses]
        solved = _Parameters([c[0] if c else 0 for c in channels] if uses[0].path else [0])
        items: list[Item] = []
        for position, part in enumerate(parts[0]):
            items.append(self._item(part, [p[position] for p in parts], solved, uses[0].path))
        block = Block(name, solved.parameters(), solved.uses_channels, tuple(items), uses[0].inputs, uses[0].outputs)
        for number, group in enumerate(uses):
            block.arguments[group] = solved.of_use(number)
        return block

    def _item(self, part: Step | Group, all_uses: Sequence[Step | Group], solved: _Parameters, path: str) -> Item:
        if isinstance(part, Group):
            block = self._blocks[self._keys[part]]
            arguments: list[str] = []
            named = False
            for parameter in block.parameters:
                values = [block.arguments[g][parameter.name] for g in all_uses if isinstance(g, Group)]
                if parameter.default is not None and all(v == parameter.default for v in values):
                    named = True
                    continue
                text = solved.text(values, parameter.name, parameter.default)
                arguments.append(f"{parameter.name}={text}" if named or parameter.default is not None else text)
            written = f"{block.name}({', '.join(arguments)})" if arguments else block.name
            return Item(written, part.inputs, part.outputs, below(part.path, path), part.path.partition(".")[0])
        steps = [step for step in all_uses if isinstance(step, Step)]
        text = part.op if part.op in OPERATORS else _layer(part.op, steps, solved)
        top = part.modules[0].path.partition(".")[0] if part.modules else ""
        return Item(text, part.inputs, part.results, below(part.label, path), top)


def _layer(op: str, steps: Sequence[Step], solved: _Parameters) -> str:
    """Return the text of one layer of a block's body, given the steps of this layer in all uses of the block."""
    if len({step.op for step in steps}) > 1:
        return solved.text([Word(step.op) for step in steps], "act", None)
    arguments: list[str] = []
    for parameter in LAYERS[op].parameters:
        if not any(parameter.name in step.settings for step in steps):
            continue
        default = parameter.default
        values = [_setting(step, parameter) for step in steps]
        text = solved.text(values, parameter.name, default)
        arguments.append(text if default is None else f"{parameter.name}={text}")
    return f"{op}({', '.join(arguments)})" if arguments else op


def _setting(step: Step, parameter: ops.Parameter) -> Setting:
    """Return a setting of a step, or the language's default if the step does not state it."""
    value = step.settings.get(parameter.name, parameter.default)
    assert value is not None
    return value


class _Parameters:
    """The differences between the uses of a block as parameters, each difference once.

    `channels` are the channels of the first tensor of each use.
    """

    def __init__(self, channels: Sequence[int]) -> None:
        self._channels = list(channels)
        self._names: dict[str, list[Value]] = {}
        self._defaults: dict[str, Value | None] = {}
        self.uses_channels = False

    def text(self, values: Sequence[Value], name: str, default: Value | None) -> str:
        """Return the text of a setting with these values in the uses: a literal, a parameter or an expression."""
        if all(value == values[0] and type(value) is type(values[0]) for value in values):
            return literal(values[0])
        whole = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
        for existing, its_values in self._names.items():
            if its_values == list(values):
                return existing
        counted = self._counted(whole, name) if len(whole) == len(values) else None
        if counted is not None:
            return counted
        own = next(n for n in (name, *(f"{name}{i}" for i in range(2, 99))) if n not in self._names)
        self._names[own] = list(values)
        if isinstance(values[0], Word):
            default = max(values, key=values.count)
        self._defaults[own] = default if default in values else None
        return own

    def _counted(self, values: Sequence[int], name: str) -> str | None:
        """Return integers as an expression of other parameters; None if there is none.

        A padding is half of a kernel; channels are the input's channels, or another parameter, times an integer.
        """
        kind = name.rstrip("0123456789")
        if kind == "pad":
            kernels = (k for k, its in self._names.items() if k.startswith("kernel") and list(values) == _halves(its))
            return next((f"{kernel} // 2" for kernel in kernels), None)
        if kind not in _COUNTS:
            return None
        if values == self._channels:
            self.uses_channels = True
            return _CHANNELS
        counts = [(n, its) for n, its in self._names.items() if n.rstrip("0123456789") in _COUNTS]
        if self.uses_channels:
            counts.append((_CHANNELS, list(self._channels)))
        for factor in _FACTORS:
            for text, its_values in counts:
                if list(values) == [factor * v if isinstance(v, int) else None for v in its_values]:
                    return f"{factor} * {text}"
        return None

    def parameters(self) -> tuple[Parameter, ...]:
        """Return the parameters, those without a default first."""
        parameters = [Parameter(name, self._defaults[name]) for name in self._names]
        return tuple(sorted(parameters, key=lambda p: p.default is not None))

    def of_use(self, number: int) -> dict[str, Value]:
        return {name: values[number] for name, values in self._names.items()}


def _halves(values: Sequence[Value]) -> list[int | None]:
    return [value // 2 if isinstance(value, int) else None for value in values]


def literal(value: Value) -> str:
    """Return a value as the language writes it."""
    if isinstance(value, Word):
        return value.text
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(value)


def _all_groups(group: Group) -> Iterator[Group]:
    for item in group.items:
        if isinstance(item, Group):
            yield from _all_groups(item)
            yield item


def _block_name(group: Group) -> str:
    """Return the name of a block: the module's class in snake case, or the module's own name for a container class."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", group.name).lower()
    if words in ("sequential", "module_list"):
        parts = [part.rstrip("0123456789_") for part in group.path.split(".")]
        words = next((part for part in reversed(parts) if part), "stage")
    words = words.strip("_") or "unit"
    return f"{words}_layers" if words in reserved() else words
