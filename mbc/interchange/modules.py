"""Steps -> the tree of module calls they were made in: what may become a block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mbc.interchange.steps import Imported, Number, Step, label_of
from mbc.ops import activation, activation_variants, composed

# Layers that only differ in what they do to each element: a block may take one of them as a setting.
ACTIVATIONS = frozenset(layer.name for family in (activation, activation_variants, composed) for layer in family.LAYERS)


@dataclass(frozen=True, eq=False)
class Group:
    """One call of a module. `path`: as a label; `name`: of the module's class. `inputs`: values from outside, in the
    order of their first use; `outputs`: values that others use. `closed`: it can be a block."""

    path: str
    name: str
    items: tuple[Step | Group, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    closed: bool

    def steps(self) -> Iterator[Step]:
        for item in self.items:
            if isinstance(item, Group):
                yield from item.steps()
            else:
                yield item


def build_tree(network: Imported) -> Group:
    """The whole network as one group, whose path is empty."""
    return _Tree(network).group("", network.name, _nested(network.steps, 0))


@dataclass(frozen=True, slots=True)
class _Call:
    path: str
    name: str
    items: list[Step | _Call]


def _nested(steps: Sequence[Step], depth: int) -> list[Step | _Call]:
    """Steps by the module call they were made in at this depth. A module that made one step alone is that step."""
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
        made = tuple(self.group(i.path, i.name, i.items) if isinstance(i, _Call) else i for i in items)
        draft = Group(path, name, made, (), (), False)
        steps = list(draft.steps())
        own = {value for step in steps for value in step.results}
        inputs = tuple(dict.fromkeys(v for step in steps for v in step.values if v not in own))
        outputs = tuple(v for v in sorted(own) if v in self._outputs or self._users.get(v, set()) - own)
        labels = Counter(step.label for step in steps if step.label)
        inside = all(label.startswith(f"{path}.") for label in labels)
        inside &= all(not isinstance(i, Group) or i.path.startswith(f"{path}.") for i in made)
        alone = self._paths[path] == 1 and all(self._labels[label] == count for label, count in labels.items())
        whole = bool(inputs) and bool(outputs) and len(steps) > 1
        return Group(path, name, made, inputs, outputs, bool(path) and inside and alone and whole)


def below(path: str, outer: str) -> str:
    """A path as a label within the block of the path `outer`."""
    return path.removeprefix(f"{outer}.") if outer else path


def skeletons(root: Group) -> Mapping[Group, object]:
    """What two groups must have in common to be one block: everything but the values of settings and which activation
    follows what. `compared` with each other, not shown."""
    found: dict[Group, object] = {}
    _skeleton(root, found)
    return found


def _skeleton(group: Group, found: dict[Group, object]) -> object:
    numbers: dict[int, int] = {value: n for n, value in enumerate(group.inputs)}
    labels: dict[str, int] = {}
    items: list[object] = []
    for item in group.items:
        if isinstance(item, Group):
            inner = _skeleton(item, found)
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
    made = (len(group.inputs), tuple(items), outputs, group.closed)
    found[group] = made
    return made
