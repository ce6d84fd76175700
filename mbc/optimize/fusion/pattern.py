"""A fusion pattern: a small program to be matched in a graph, whose operations one or a few launches may cover.

A pattern consists of a few statements over local names. Each of its launches, in order, lists the statements that it
runs and the values that it writes. A statement that is not among `replaces` keeps a launch of its own: the fused launch
recomputes its result, and has less to read. An input with a question mark is optional.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mbc.ir.graph import Operation

_STATEMENT = re.compile(r"([\w ,]+)=\s*(\w+)\(([\w ,?]*)\)")
_COMMUTATIVE = frozenset({"add", "mul"})


@dataclass(frozen=True, slots=True)
class Statement:
    """One operation of a pattern: `outputs = kind(inputs)`, values by names local to the pattern.

    An operation has all of the `optional` inputs or none.
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    optional: frozenset[str]

    @staticmethod
    def parse(text: str) -> Statement:
        """Parse a statement such as `z = add(x, y?)`."""
        match = _STATEMENT.fullmatch(text)
        assert match is not None, text
        outputs, kind, inputs = match.groups()
        names = [name.strip() for name in inputs.split(",")]
        return Statement(
            kind,
            tuple(name.rstrip("?") for name in names),
            tuple(name.strip() for name in outputs.split(",")),
            frozenset(name.rstrip("?") for name in names if name.endswith("?")),
        )


@dataclass(frozen=True, slots=True)
class LaunchPattern:
    """One launch: the numbers of the `statements` that it runs, and the names that it `writes`."""

    statements: tuple[int, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A small program and the launches that may run it.

    Matching starts at the last statement: all others have to be reached from there, from readers to producers, or as
    readers of values that are bound.

    Attributes:
        statements: The program.
        launches: The launches that run it, in order.
        replaces: Numbers of the statements that need no launch of their own any more.
        late: Whether values that the pattern does not store may have readers that other groups run without reading
            these values. The pattern is selected only where such groups are.
        measured: Whether the model does not predict the time, so that the pattern is used only where it was measured,
            here or on a similar GPU.
    """

    statements: tuple[Statement, ...]
    launches: tuple[LaunchPattern, ...]
    replaces: tuple[int, ...]
    late: bool = False
    measured: bool = False

    @staticmethod
    def of(
        *texts: str,
        launches: tuple[LaunchPattern, ...] = (),
        replaces: tuple[int, ...] = (),
        late: bool = False,
        measured: bool = False,
    ) -> Pattern:
        """Return a pattern of statements.

        By default one launch runs all of them and writes the outputs of the last one.
        """
        statements = tuple(map(Statement.parse, texts))
        everything = tuple(range(len(texts)))
        launches = launches or (LaunchPattern(everything, statements[-1].outputs),)
        return Pattern(statements, launches, replaces or everything, late, measured)

    def with_norm(self, norm: str, relu: str) -> Pattern:
        """Return the pattern with another norm and activation in the places of batch normalisation and ReLU."""
        kinds = (s.kind.replace("batch_", f"{norm}_").replace("relu", relu) for s in self.statements)
        return replace(self, statements=tuple(replace(s, kind=k) for s, k in zip(self.statements, kinds, strict=True)))


@dataclass(frozen=True, slots=True)
class Binding:
    """A match of a pattern in a graph: the operation of each statement and the value of each name."""

    operations: Mapping[int, Operation]
    values: Mapping[str, str]


def find(
    pattern: Pattern,
    last: Operation,
    producers: Mapping[str, Operation],
    readers: Mapping[str, Sequence[Operation]] = MappingProxyType({}),
) -> Iterator[Binding]:
    """Yield the matches of the pattern with `last` as its last statement, one for each set of operations.

    Args:
        pattern: The pattern.
        last: The operation of the last statement.
        producers: Operations by their outputs.
        readers: Operations by their inputs, for patterns that reach from a value to its readers.
    """
    seen: set[frozenset[str]] = set()
    for start in _bind(pattern, len(pattern.statements) - 1, last, producers, Binding({}, {})):
        for binding in _bind_readers(pattern, producers, readers, start):
            names = frozenset(operation.name for operation in binding.operations.values())
            if names not in seen:
                seen.add(names)
                yield binding


def _bind(
    pattern: Pattern, number: int, operation: Operation, producers: Mapping[str, Operation], so_far: Binding
) -> Iterator[Binding]:
    statement = pattern.statements[number]
    required = len(statement.inputs) - len(statement.optional)
    fits = (
        operation.kind == statement.kind
        and len(operation.inputs) in (required, len(statement.inputs))
        and len(operation.outputs) == len(statement.outputs)
        and operation not in so_far.operations.values()
    )
    if not fits:
        return
    orders = [operation.inputs]
    if statement.kind in _COMMUTATIVE:
        orders.append(operation.inputs[::-1])
    for inputs in orders:
        names = (*statement.inputs[: len(inputs)], *statement.outputs)
        values = _agree(so_far.values, names, (*inputs, *operation.outputs))
        if values is not None:
            yield from _bind_makers(
                pattern, number, producers, Binding({**so_far.operations, number: operation}, values)
            )


def _bind_makers(
    pattern: Pattern, number: int, producers: Mapping[str, Operation], so_far: Binding
) -> Iterator[Binding]:
    """Yield bindings in which the statements before `number` whose outputs are bound are bound, too."""
    for before, other in enumerate(pattern.statements[:number]):
        value = next((so_far.values[name] for name in other.outputs if name in so_far.values), None)
        if before not in so_far.operations and value is not None:
            if value in producers:
                for binding in _bind(pattern, before, producers[value], producers, so_far):
                    yield from _bind_makers(pattern, number, producers, binding)
            return
    yield so_far


def _bind_readers(
    pattern: Pattern, producers: Mapping[str, Operation], readers: Mapping[str, Sequence[Operation]], so_far: Binding
) -> Iterator[Binding]:
    """Yield bindings of the remaining statements, each as a reader of a value that is bound."""
    for number, statement in enumerate(pattern.statements):
        read = next((so_far.values[name] for name in statement.inputs if name in so_far.values), None)
        if number not in so_far.operations and read is not None:
            for reader in readers.get(read, ()):
                for binding in _bind(pattern, number, reader, producers, so_far):
                    yield from _bind_readers(pattern, producers, readers, binding)
            return
    if len(so_far.operations) == len(pattern.statements):
        yield so_far


def _agree(bound: Mapping[str, str], names: tuple[str, ...], values: tuple[str, ...]) -> Mapping[str, str] | None:
    """Return `bound` with these names bound as well, or None if a name is already bound to another value."""
    extended = dict(bound)
    for name, value in zip(names, values, strict=True):
        if extended.setdefault(name, value) != value:
            return None
    return extended
