"""A fusion pattern: a small program to be found in a graph, whose operations one launch may cover, or a few.

A pattern is a few statements over names of its own. Its launches, in order, say which statements they run and which
values they write. A statement that no launch `replaces` stays where it is in the step as well: a launch that recomputes
it has less to read. A name with a question mark may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mbc.ir.graph import Operation

_STATEMENT = re.compile(r"([\w ,]+)=\s*(\w+)\(([\w ,?]*)\)")
_COMMUTATIVE = frozenset({"add", "mul"})


@dataclass(frozen=True, slots=True)
class Statement:
    """One operation of a pattern: `outputs = kind(inputs)`, values by names that hold for the pattern alone. Of
    `optional` inputs it has all or none."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    optional: frozenset[str]

    @staticmethod
    def parse(text: str) -> Statement:
        found = _STATEMENT.fullmatch(text)
        assert found is not None, text
        outputs, kind, inputs = found.groups()
        names = [name.strip() for name in inputs.split(",")]
        return Statement(
            kind,
            tuple(name.rstrip("?") for name in names),
            tuple(name.strip() for name in outputs.split(",")),
            frozenset(name.rstrip("?") for name in names if name.endswith("?")),
        )


@dataclass(frozen=True, slots=True)
class Part:
    """One launch: `runs` are numbers of statements, `gives` the names that it writes."""

    runs: tuple[int, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """`replaces`: numbers of the statements that need no launch of their own any more. The last statement is where
    finding the pattern starts: all others have to be reached from it, from readers to makers. `late`: what it leaves
    unmade may have readers that other groups run without reading it; it is taken where these are. `measured`: how long
    it takes nobody can tell who has not measured it; it is not known before."""

    statements: tuple[Statement, ...]
    launches: tuple[Part, ...]
    replaces: tuple[int, ...]
    late: bool = False
    measured: bool = False

    @staticmethod
    def of(
        *texts: str,
        launches: tuple[Part, ...] = (),
        replaces: tuple[int, ...] = (),
        late: bool = False,
        measured: bool = False,
    ) -> Pattern:
        """One launch of everything that writes what the last statement makes, unless something else is said."""
        statements = tuple(map(Statement.parse, texts))
        everything = tuple(range(len(texts)))
        launches = launches or (Part(everything, statements[-1].outputs),)
        return Pattern(statements, launches, replaces or everything, late, measured)


@dataclass(frozen=True, slots=True)
class Binding:
    """A pattern found in a graph: the operation of each statement and the value of each name."""

    operations: Mapping[int, Operation]
    values: Mapping[str, str]


def find(pattern: Pattern, last: Operation, makers: Mapping[str, Operation]) -> Iterator[Binding]:
    """The pattern with `last` as its last statement, once for all operations that it may be found with. `makers`:
    operations by their outputs."""
    known: set[frozenset[str]] = set()
    for binding in _bind(pattern, len(pattern.statements) - 1, last, makers, Binding({}, {})):
        names = frozenset(operation.name for operation in binding.operations.values())
        if names not in known:
            known.add(names)
            yield binding


def _bind(
    pattern: Pattern, number: int, operation: Operation, makers: Mapping[str, Operation], so_far: Binding
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
            yield from _bind_makers(pattern, number, makers, Binding({**so_far.operations, number: operation}, values))


def _bind_makers(pattern: Pattern, number: int, makers: Mapping[str, Operation], so_far: Binding) -> Iterator[Binding]:
    """With the statements before `number` whose outputs have become known."""
    for before, other in enumerate(pattern.statements[:number]):
        made = next((so_far.values[name] for name in other.outputs if name in so_far.values), None)
        if before not in so_far.operations and made is not None:
            if made in makers:
                for found in _bind(pattern, before, makers[made], makers, so_far):
                    yield from _bind_makers(pattern, number, makers, found)
            return
    yield so_far


def _agree(known: Mapping[str, str], names: tuple[str, ...], values: tuple[str, ...]) -> Mapping[str, str] | None:
    """`known` with these names, unless one of them stands for another value already."""
    found = dict(known)
    for name, value in zip(names, values, strict=True):
        if found.setdefault(name, value) != value:
            return None
    return found
