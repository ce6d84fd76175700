"""Groups of operations that one launch may cover, as small programs to be found in a graph.

A pattern is a few statements over names of its own. Its launches, in order, say which statements they run and which
values they write. A statement that no launch `replaces` stays where it is in the step as well: a launch that runs it
again computes what others have stored from what is there anyway, so that it has less to read. A name with a question
mark may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mbc.ir.graph import Operation

_STATEMENT = re.compile(r"([\w ,]+)=\s*(\w+)\(([\w ,?]*)\)")
_COMMUTATIVE = frozenset({"add", "mul"})

_NORMALIZE = "batch_normalize(x, mean, variance, gamma?, beta?)"
_SUMS = "dgamma, dbeta = batch_normalize_sums(x, d, mean, variance)"
_TWICE = "z2 = batch_normalize(x2, mean2, variance2, gamma2?, beta2?)"
_THROUGH_RELU = "d = relu_backward(y, dy)"
_MAKE_SIGNS = "signs = relu_signs(y)"
_BY_SIGNS = "d = relu_backward_signs(dy, signs)"
_BEHIND_POOL = ("m = relu_backward(p, dp)", "d = max_pool_backward(index, m)")
_BACKWARD = "dx = batch_normalize_backward(x, d, mean, variance, dgamma, dbeta, gamma?)"
_STATISTICS = "mean, variance = batch_statistics(x)"
_DATA = "dy = convolution_backward_data(g, w)"
_DATA_ADDED = (_DATA.replace("dy", "a"), "dy = add(a, b)")
_MADE = "x = convolution(image, w)"
_SECOND = tuple(tuple(text.replace("w)", "w2)") for text in texts) for texts in ((_DATA,), _DATA_ADDED))


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


# Sums over the gradient that a convolution makes, or the sum of that and another one, through relu: it is summed up
# before it is written, or in the place of that.
DATA_SUMS: tuple[Pattern, ...] = (
    *(
        Pattern.of(
            *gradient,
            through_relu,
            _SUMS,
            launches=(Part(tuple(range(2 + len(gradient))), ("d", "dgamma", "dbeta")),),
            measured=True,
        )
        for through_relu in (_THROUGH_RELU, _BY_SIGNS)
        for gradient in ((_DATA,), _DATA_ADDED)
    ),
    Pattern.of(
        _DATA,
        f"z = {_NORMALIZE}",
        "y = relu(z)",
        _THROUGH_RELU,
        _SUMS,
        _BACKWARD,
        launches=(Part((0, 1, 2, 3, 4), ("dy", "dgamma", "dbeta")), Part((1, 2, 3, 5), ("dx",))),
        replaces=(0, 3, 4, 5),
        measured=True,
    ),
)
# The same where what is normalised is a part of the next concatenation, too.
DATA_SUMS_OF_PARTS: tuple[Pattern, ...] = tuple(
    Pattern.of(
        _DATA,
        f"z = {_NORMALIZE}",
        "y = relu(z)",
        _THROUGH_RELU,
        _SUMS,
        _BACKWARD.replace("dx", "b"),
        "a = channel_slice(wide)",
        "dx = add(a, b)",
        *taken,
        launches=(
            Part((0, 1, 2, 3, 4), ("dy", "dgamma", "dbeta")),
            Part((1, 2, 3, 5, 6, 7, *range(8, 8 + len(taken))), ("dx", *(("part",) if taken else ()))),
        ),
        replaces=(0, 3, 4, 5, 6, 7, *range(8, 8 + len(taken))),
        measured=True,
    )
    for taken in ((), ("part = channel_slice(dx)",))
)

# What a convolution made is made again for batch normalisation's backward pass, and kept to itself: where its image is
# smaller there is less to read.
MADE_INSIDE: tuple[Pattern, ...] = (
    *(
        Pattern.of(_MADE, last, launches=(Part((0, 1), made),), replaces=(1,), measured=True)
        for last, made in ((_SUMS, ("dgamma", "dbeta")), (_BACKWARD, ("dx",)))
    ),
    *(
        Pattern.of(
            _MADE,
            f"z = {_NORMALIZE}",
            "y = relu(z)",
            _THROUGH_RELU,
            _SUMS,
            _BACKWARD,
            launches=(Part((*again, 1, 2, 3, 4), ("dgamma", "dbeta")), Part((0, 1, 2, 3, 5), ("dx",))),
            replaces=(3, 4, 5),
            measured=True,
        )
        for again in ((), (0,))
    ),
)

# The same of sums behind relu, whose gradient they write.
INSIDE_SUMS: tuple[Pattern, ...] = tuple(
    Pattern.of(
        _MADE,
        *added,
        through_relu,
        _SUMS,
        launches=(Part(tuple(range(3 + len(added))), ("d", "dgamma", "dbeta")),),
        replaces=tuple(range(1, 3 + len(added))),
        measured=True,
    )
    for through_relu in (_THROUGH_RELU, _BY_SIGNS)
    for added in ((), ("dy = add(a, b)",))
)

# And the gradient that comes back to them: neither is read or written.
PAIR_SUMS: tuple[Pattern, ...] = tuple(
    Pattern.of(
        _MADE,
        *gradient,
        through_relu,
        _SUMS,
        launches=(Part(tuple(range(3 + len(gradient))), ("d", "dgamma", "dbeta")),),
        replaces=tuple(range(1, 3 + len(gradient))),
        measured=True,
    )
    for through_relu in (_THROUGH_RELU, _BY_SIGNS)
    for gradient in _SECOND
)

PATTERNS: tuple[Pattern, ...] = (
    # Forward, one pass over everything: two or three operands are read, one is written.
    Pattern.of(f"z = {_NORMALIZE}", "y = relu(z)"),
    Pattern.of(f"z = {_NORMALIZE}", "s = add(z, r)", "y = relu(s)"),
    Pattern.of(
        f"z = {_NORMALIZE}",
        _TWICE,
        "s = add(z, z2)",
        "y = relu(s)",
    ),
    # Its signs, for its gradient (`mbc.ir.signs`), are written on the way.
    *(
        Pattern.of(
            f"z = {_NORMALIZE}",
            *others,
            "y = relu(s)",
            _MAKE_SIGNS,
            launches=(Part(tuple(range(3 + len(others))), ("y", "signs")),),
        )
        for others in (("s = add(z, r)",), (_TWICE, "s = add(z, z2)"))
    ),
    Pattern.of("z = bias_add(x, bias)", "y = relu(z)"),
    Pattern.of(
        "c = concat(left, right)",
        f"z = {_NORMALIZE.replace('(x', '(c')}",
        "y = relu(z)",
        launches=(Part((0, 1, 2), ("c", "y")),),
    ),
    # Parts that are normalised each by itself. relu's gradient makes each again from what was normalised.
    *(
        Pattern.of(
            *(f"z{i} = batch_normalize(x{i}, mean{i}, variance{i}, gamma{i}?, beta{i}?)" for i in parts),
            *(f"y{i} = relu(z{i})" for i in parts),
            f"c = concat({', '.join(f'y{i}' for i in parts)})",
            late=True,
        )
        for parts in (range(3, 7), range(3, 6), range(3, 5))
    ),
    # What a transposed convolution makes is a part of a concatenation that is written by itself nowhere.
    *(
        Pattern.of(*made, "z = bias_add(x, bias)", f"y = concat({parts})")
        for made in ((), ("x = convolution_backward_data(a, w)",))
        for parts in ("z, r", "r, z")
    ),
    # Backward through relu and batch norm. What relu let through is computed again from x, which both launches read
    # anyway, so that neither y nor the gradient between the two is read or written.
    Pattern.of(
        f"z = {_NORMALIZE}",
        "y = relu(z)",
        "d = relu_backward(y, dy)",
        _SUMS,
        _BACKWARD,
        launches=(Part((0, 1, 2, 3), ("dgamma", "dbeta")), Part((0, 1, 2, 4), ("dx",))),
        replaces=(2, 3, 4),
    ),
    # The same where the gradient behind relu is that of a part of a concatenation: it is read where it lies.
    Pattern.of(
        f"z = {_NORMALIZE}",
        "y = relu(z)",
        "dy = channel_slice(wide)",
        "d = relu_backward(y, dy)",
        _SUMS,
        _BACKWARD,
        launches=(Part((0, 1, 2, 3, 4), ("dgamma", "dbeta")), Part((0, 1, 2, 3, 5), ("dx",))),
        replaces=(2, 3, 4, 5),
    ),
    # What is normalised is a part of the next concatenation, too, and its gradient the sum of both. It is one itself,
    # and the gradient of its own last part is taken out of the sum on the way.
    *(
        Pattern.of(
            f"z = {_NORMALIZE}",
            "y = relu(z)",
            "d = relu_backward(y, dy)",
            _SUMS,
            _BACKWARD.replace("dx", "b"),
            "a = channel_slice(wide)",
            "dx = add(a, b)",
            *taken,
            launches=(
                Part((0, 1, 2, 3), ("dgamma", "dbeta")),
                Part((0, 1, 2, 4, 5, 6, *range(7, 7 + len(taken))), ("dx", *(("part",) if taken else ()))),
            ),
            replaces=(2, 3, 4, 5, 6, *range(7, 7 + len(taken))),
        )
        for taken in ((), ("part = channel_slice(dx)",))
    ),
    # Before a pool, which alone needs what relu made (its gradient is told by the pooled image, `mbc.ir.commute`): what
    # is pooled exists nowhere.
    *(
        Pattern.of(*before, pool)
        for before in ((f"z = {_NORMALIZE}", "y = relu(z)"), ("z = bias_add(x, bias)", "y = relu(z)"), ("y = relu(x)",))
        for pool in ("p, index = max_pool(y)", "p = max_pool(y)")
    ),
    # Others read what is pooled: it is written on the way.
    *(
        Pattern.of(
            f"z = {_NORMALIZE}",
            "y = relu(z)",
            f"{', '.join(made)} = max_pool(y)",
            launches=(Part((0, 1, 2), ("y", *made)),),
        )
        for made in (("p", "index"), ("p",))
    ),
    # Backward through such a pool. Gathering the pooled gradient takes less than reading what another launch has
    # gathered, so that both launches of a batch norm do.
    Pattern.of(*_BEHIND_POOL),
    Pattern.of(*_BEHIND_POOL, "db = channel_sum(d)", launches=(Part((0, 1, 2), ("d", "db")),)),
    Pattern.of(
        *_BEHIND_POOL,
        _SUMS,
        _BACKWARD,
        launches=(Part((0, 1, 2), ("dgamma", "dbeta")), Part((0, 1, 3), ("dx",))),
    ),
    # Where others read what is pooled, its gradient is a sum.
    Pattern.of("b = max_pool_backward(index, dp)", "dy = add(a, b)"),
    # So is that of whatever has several readers.
    Pattern.of("s = add(a, b)", "dy = add(s, r)"),
    Pattern.of("b = max_pool_backward(index, dp)", "s = add(a, b)", "dy = add(s, r)"),
    Pattern.of("b = max_pool_backward(index, dp)", "s = add(a, b)", "z = add(s, r)", "dy = add(z, z2)"),
    Pattern.of(
        f"z = {_NORMALIZE}",
        "y = relu(z)",
        "b = max_pool_backward(index, dp)",
        "dy = add(a, b)",
        "d = relu_backward(y, dy)",
        _SUMS,
        _BACKWARD,
        launches=(Part((0, 1, 2, 3, 4, 5), ("dgamma", "dbeta")), Part((0, 1, 2, 3, 4, 6), ("dx",))),
        replaces=(2, 3, 4, 5, 6),
    ),
    # And was concatenated to others: its other gradient is a part of a wider one.
    Pattern.of(
        f"z = {_NORMALIZE}",
        "y = relu(z)",
        "b = max_pool_backward(index, dp)",
        "a = channel_slice(wide)",
        "dy = add(a, b)",
        "d = relu_backward(y, dy)",
        _SUMS,
        _BACKWARD,
        launches=(Part((0, 1, 2, 3, 4, 5, 6), ("dgamma", "dbeta")), Part((0, 1, 2, 3, 4, 5, 7), ("dx",))),
        replaces=(2, 3, 4, 5, 6, 7),
    ),
    # Where relu comes after a residual sum its gradient goes to both branches: it is written on the way to the sums.
    *(
        Pattern.of(
            *added,
            through_relu,
            _SUMS,
            launches=(Part(tuple(range(2 + len(added))), ("d", "dgamma", "dbeta")),),
        )
        for through_relu in (_THROUGH_RELU, _BY_SIGNS)
        for added in ((), ("dy = add(a, b)",))
    ),
    Pattern.of("d = channel_slice(wide)", "db = channel_sum(d)", launches=(Part((0, 1), ("d", "db")),)),
    Pattern.of("d = relu_backward(y, dy)", "db = channel_sum(d)", launches=(Part((0, 1), ("d", "db")),)),
    # Small tensors, where a launch takes longer than what it reads: sums and what needs them, at once.
    *(
        Pattern.of(
            _STATISTICS,
            f"{'y' if not behind else 'z'} = {_NORMALIZE}",
            *behind,
            launches=(Part(tuple(range(2 + len(behind))), ("mean", "variance", "y")),),
        )
        for behind in ((), ("y = relu(z)",), ("s = add(z, r)", "y = relu(s)"))
    ),
    Pattern.of(_SUMS, _BACKWARD, launches=(Part((0, 1), ("dgamma", "dbeta", "dx")),)),
    Pattern.of(
        f"z = {_NORMALIZE}",
        "y = relu(z)",
        _THROUGH_RELU,
        _SUMS,
        _BACKWARD,
        launches=(Part((0, 1, 2, 3, 4), ("dgamma", "dbeta", "dx")),),
        replaces=(2, 3, 4),
    ),
    *(
        Pattern.of(
            *added,
            _THROUGH_RELU,
            _SUMS,
            _BACKWARD,
            launches=(Part(tuple(range(3 + len(added))), ("d", "dgamma", "dbeta", "dx")),),
        )
        for added in ((), ("dy = add(a, b)",))
    ),
    # Of a concatenation, one part of which was not read before (`mbc.ir.statistics`).
    *(
        Pattern.of("m, v = batch_statistics(x)", f"mean, variance = join_statistics({pairs})")
        for pairs in ("m0, v0, m, v", "m, v, m0, v0")
    ),
    # What a convolution makes is summed up before it is written.
    Pattern.of("x = convolution(a, w)", _STATISTICS, launches=(Part((0, 1), ("x", "mean", "variance")),)),
    *DATA_SUMS,
    *DATA_SUMS_OF_PARTS,
    *MADE_INSIDE,
    *INSIDE_SUMS,
    *PAIR_SUMS,
)

# Sums over a gradient behind relu that make relu's output again on the way, for whoever reads it next: most of what it
# is made of is read anyway. Within a budget they run where relu's output was not kept (`mbc.optimize.along`).
RELU_ALONG: tuple[Pattern, ...] = (
    Pattern.of(
        f"z = {_NORMALIZE}",
        "y = relu(z)",
        _THROUGH_RELU,
        _SUMS,
        launches=(Part((0, 1, 2, 3), ("y", "dgamma", "dbeta")),),
        replaces=(2, 3),
    ),
    *(
        Pattern.of(
            f"z = {_NORMALIZE}",
            *others,
            "y = relu(s)",
            *signs,
            *added,
            through_relu,
            _SUMS,
            launches=(Part(tuple(range(4 + len(others + signs + added))), ("y", "d", "dgamma", "dbeta")),),
            replaces=tuple(range(2 + len(others + signs), 4 + len(others + signs + added))),
        )
        for others in (("s = add(z, r)",), (_TWICE, "s = add(z, z2)"))
        for signs, through_relu in (((), _THROUGH_RELU), ((_MAKE_SIGNS,), _BY_SIGNS))
        for added in ((), ("dy = add(a, b)",))
    ),
)

# Sums that make again on the way what they are over: a product that takes less than reading its result.
CONVOLUTION_ALONG: tuple[Pattern, ...] = (
    Pattern.of(_MADE, _SUMS, launches=(Part((0, 1), ("x", "dgamma", "dbeta")),), replaces=(1,)),
    *(
        Pattern.of(
            _MADE,
            *added,
            through_relu,
            _SUMS,
            launches=(Part(tuple(range(3 + len(added))), ("x", "d", "dgamma", "dbeta")),),
            replaces=tuple(range(1, 3 + len(added))),
        )
        for through_relu in (_THROUGH_RELU, _BY_SIGNS)
        for added in ((), ("dy = add(a, b)",))
    ),
)

# Both, where either would be: relu's output is made of what the convolution makes, which nobody has to read then.
BOTH_ALONG: tuple[Pattern, ...] = tuple(
    Pattern.of(
        _MADE,
        f"z = {_NORMALIZE}",
        "s = add(z, r)",
        "y = relu(s)",
        *signs,
        *added,
        through_relu,
        _SUMS,
        launches=(Part(tuple(range(6 + len(signs + added))), ("x", "y", "d", "dgamma", "dbeta")),),
        replaces=tuple(range(4 + len(signs), 6 + len(signs + added))),
    )
    for signs, through_relu in (((), _THROUGH_RELU), ((_MAKE_SIGNS,), _BY_SIGNS))
    for added in ((), ("dy = add(a, b)",))
)

# relu's output along with the sums of `DATA_SUMS`.
DATA_ALONG: tuple[Pattern, ...] = (
    Pattern.of(
        _DATA,
        f"z = {_NORMALIZE}",
        "y = relu(z)",
        _THROUGH_RELU,
        _SUMS,
        launches=(Part((0, 1, 2, 3, 4), ("dy", "y", "dgamma", "dbeta")),),
        replaces=(0, 3, 4),
    ),
    *(
        Pattern.of(
            gradient[0],
            f"z = {_NORMALIZE}",
            "s = add(z, r)",
            "y = relu(s)",
            *signs,
            *gradient[1:],
            through_relu,
            _SUMS,
            launches=(Part(tuple(range(5 + len(signs + gradient))), ("y", "d", "dgamma", "dbeta")),),
            replaces=(0, *range(4 + len(signs), 5 + len(signs + gradient))),
        )
        for signs, through_relu in (((), _THROUGH_RELU), ((_MAKE_SIGNS,), _BY_SIGNS))
        for gradient in ((_DATA,), _DATA_ADDED)
    ),
)

# The same of `PAIR_SUMS`.
PAIR_ALONG: tuple[Pattern, ...] = tuple(
    Pattern.of(
        _MADE,
        gradient[0],
        f"z = {_NORMALIZE}",
        "s = add(z, r)",
        "y = relu(s)",
        *signs,
        *gradient[1:],
        through_relu,
        _SUMS,
        launches=(Part(tuple(range(6 + len(signs + gradient))), ("y", "d", "dgamma", "dbeta")),),
        replaces=(1, *range(5 + len(signs), 6 + len(signs + gradient))),
    )
    for signs, through_relu in (((), _THROUGH_RELU), ((_MAKE_SIGNS,), _BY_SIGNS))
    for gradient in _SECOND
)

ALONG = (*RELU_ALONG, *CONVOLUTION_ALONG, *BOTH_ALONG, *DATA_ALONG, *PAIR_ALONG)


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
