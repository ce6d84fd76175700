"""Every launch of every pattern as a case: what is fused, against its operations one after another in float64."""

from __future__ import annotations

from collections.abc import Iterable

from mbc.ir.graph import Attributes, Operation
from mbc.ops.base import NoAttributes
from mbc.ops.fused import join
from mbc.ops.normalization import BatchNormalize, BatchNormalizeBackward
from mbc.optimize.patterns import PATTERNS, Part, Pattern, Statement
from tests.kernels.own.cases import LONG, SHAPES, Case, Operand, Shape, m, positive, w

EPS = 1e-3
SAME = frozenset({"x", "x2", "y", "z", "z2", "s", "r", "d", "dy", "dx", "a", "b"})  # of the shape of the image


def _attributes(statement: Statement, shape: Shape) -> Attributes:
    if statement.kind in ("batch_normalize", "batch_normalize_sums"):
        return BatchNormalize(EPS)
    if statement.kind == "batch_normalize_backward":
        count = 1
        for size in (shape[0], *shape[2:]):
            count *= size
        return BatchNormalizeBackward(EPS, count)
    return NoAttributes()


def _operation(number: int, statement: Statement, shape: Shape, affine: bool) -> Operation:
    inputs = tuple(name for name in statement.inputs if affine or name not in statement.optional)
    return Operation(f"op{number}", statement.kind, inputs, statement.outputs, _attributes(statement, shape))


def group(pattern: Pattern, part: Part, shape: Shape, affine: bool) -> Operation:
    return join([_operation(n, pattern.statements[n], shape, affine) for n in part.runs], part.gives)


def _operand(name: str, shape: Shape) -> Operand:
    return w(*shape) if name in SAME else m(shape[1], make=positive)


def _cases() -> Iterable[Case]:
    for pattern in PATTERNS:
        optional = any(statement.optional for statement in pattern.statements)
        for part in pattern.launches:
            for affine in (True, False) if optional else (True,):
                for shape in (*SHAPES, *LONG):
                    joined = group(pattern, part, shape, affine)
                    operands = tuple(_operand(name, shape) for name in joined.inputs)
                    note = "" if affine else "-plain"
                    name = f"{joined.kind}{note}-{'x'.join(map(str, shape))}"
                    yield Case(name, joined.kind, joined.attributes, operands)


GROUPS = tuple(_cases())
