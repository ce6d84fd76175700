"""The tree of module calls of a network's steps; a call may become a block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mbc.interchange.steps import Imported, Number, Step, label_of
from mbc.ops import activation, activation_variants, composed

# Layers that differ only in a function of each element: a block may have one of them as a setting.
ACTIVATIONS = frozenset(layer.name for family in (activation, activation_variants, composed) for layer in family.LAYERS)


@dataclass(frozen=True, eq=False)
class Group:
    """One call of a module.

    Attributes:
        path: The module's path, as a label.
        name: The name of the module's class.
        items: The steps and inner calls.
        inputs: Values from outside, in the order of their first use.
        outputs: Values that steps outside use.
        closed: Whether the call can be a block.
    """

    path: str
    name: str
    items: tuple[Step | Group, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    closed: bool

    def steps(self) -> Iterator[Step]:
        """Yield all steps, those of inner calls included.

        Yields:
            A step.
        """
        for item in self.items:
            if isinstance(item, Group):
                yield from item.steps()
            else:
                yield item


def build_tree(network: Imported) -> Group:
    """Return the whole network as one group, whose path is empty."""
    return _Tree(network).group("", network.name, _nested(network.steps, 0))


@dataclass(frozen=True, slots=True)
class _Call:
    path: str
    name: str
    items: list[Step | _Call]


def _nested(steps: Sequence[Step], depth: int) -> list[Step | _Call]:
    """Return steps grouped by the module call at this depth. A module with a single step is replaced by the step."""
    items: list[Step | _Call] = []
    start = 0
    while start < len(steps):
        modules = steps[start].modules
        end = start + 1
        if len(modules) <= depth:
            items.append(steps[start])
            start = end
            continue
        key = modules[depth].key
        while end < len(steps) and len(steps[end].modules) > depth and steps[end].modules[depth].key == key:
            end += 1
        inner = _nested(steps[start:end], depth + 1)
        module = modules[depth]
        items += inner if len(inner) == 1 else [_Call(label_of(module.path), module.name, inner)]
        start = end
    return items


class _Tree:
    def __init__(self, network: Imported) -> None:
        self._outputs = network.outputs
        self._labels = Counter(step.label for step in network.steps if step.label)
        self._paths: Counter[str] = Counter()
        self._users: dict[int, set[int]] = {}
        for step in network.steps:
            for value in step.values:
                self._users.setdefault(value, set()).update(step.results)
        self._count(_nested(network.steps, 0))

    def _count(self, items: Sequence[Step | _Call]) -> None:
        for item in items:
            if isinstance(item, _Call):
                self._paths[item.path] += 1
                self._count(item.items)

    def group(self, path: str, name: str, items: Sequence[Step | _Call]) -> Group:
        nested = tuple(self.group(i.path, i.name, i.items) if isinstance(i, _Call) else i for i in items)
        draft = Group(path, name, nested, (), (), False)
        steps = list(draft.steps())
        own = {value for step in steps for value in step.results}
        inputs = tuple(dict.fromkeys(v for step in steps for v in step.values if v not in own))
        outputs = tuple(v for v in sorted(own) if v in self._outputs or self._users.get(v, set()) - own)
        labels = Counter(step.label for step in steps if step.label)
        inside = all(label.startswith(f"{path}.") for label in labels)
        inside &= all(not isinstance(i, Group) or i.path.startswith(f"{path}.") for i in nested)
        alone = self._paths[path] == 1 and all(self._labels[label] == count for label, count in labels.items())
        whole = bool(inputs) and bool(outputs) and len(steps) > 1
        return Group(path, name, nested, inputs, outputs, bool(path) and inside and alone and whole)


def below(path: str, outer: str) -> str:
    """Return a path as a label within the block of the path `outer`."""
    return path.removeprefix(f"{outer}.") if outer else path


def skeletons(root: Group) -> Mapping[Group, object]:
    """Return the skeleton of each group. Two groups with equal skeletons can be one block.

    A skeleton has everything except the values of settings and the choice of activations.
    """
    skeleton_of: dict[Group, object] = {}
    _skeleton(root, skeleton_of)
    return skeleton_of


def _skeleton(group: Group, skeleton_of: dict[Group, object]) -> object:
    numbers: dict[int, int] = {value: n for n, value in enumerate(group.inputs)}
    labels: dict[str, int] = {}
    items: list[object] = []
    for item in group.items:
        if isinstance(item, Group):
            inner = _skeleton(item, skeleton_of)
            items.append((below(item.path, group.path), inner, tuple(numbers[v] for v in item.inputs)))
            results = item.outputs
        else:
            op = "activation" if item.op in ACTIVATIONS and not item.settings else item.op
            inputs = tuple(v if isinstance(v, Number) else numbers[v] for v in item.inputs)
            suffixes = tuple(state.suffix for state in item.states)
            label = below(item.label, group.path)
            items.append((op, inputs, suffixes, label, labels.setdefault(item.label, len(labels)), len(item.results)))
            results = item.results
        for value in results:
            numbers[value] = len(numbers)
    outputs = tuple(numbers[value] for value in group.outputs)
    skeleton = (len(group.inputs), tuple(items), outputs, group.closed)
    skeleton_of[group] = skeleton
    return skeleton
