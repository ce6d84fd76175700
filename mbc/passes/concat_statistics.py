"""Batch statistics of a concatenation, concatenated from those of its parts.

Each channel has its own statistics, so those of a concatenation are those of its parts one after another. A network
that concatenates repeatedly, and normalises each time (Huang et al., "Densely Connected Convolutional Networks", 2016),
would read all channels each time. With this pass it reads only the new ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mbc.ir.graph import Operation, Value
from mbc.ops.base import NoAttributes

Pair = tuple[str, str]  # mean and variance


def statistics_by_part(operations: Sequence[Operation], values: dict[str, Value]) -> list[Operation]:
    """Return the operations with statistics of a concatenation from those of its parts.

    A second `batch_statistics` of a value is removed. Statistics of a concatenation become `concat_statistics` if at
    most one part is new; the new part is read where it is computed. With two new parts there would be more launches
    than before, so nothing changes.

    Args:
        operations: The operations of a step.
        values: Gets `mean.<part>` and `variance.<part>`.
    """
    return _Sharing(operations, values).run()


@dataclass
class _Sharing:
    operations: Sequence[Operation]
    values: dict[str, Value]
    statistics: dict[str, Pair] = field(default_factory=dict[str, Pair])  # by the value whose statistics they are
    renamed: dict[str, str] = field(default_factory=dict[str, str])
    behind: dict[str, list[Operation]] = field(default_factory=dict[str, list[Operation]])  # by the operand's maker

    def __post_init__(self) -> None:
        """Collect the makers of values and the names of operations."""
        self.makers: Mapping[str, Operation] = {v: op for op in self.operations for v in op.outputs}
        self.names = {op.name for op in self.operations}

    def run(self) -> list[Operation]:
        kept = [written for op in self.operations if (written := self._written(op)) is not None]
        operations: list[Operation] = []
        for op in kept:
            operations.append(replace(op, inputs=tuple(self.renamed.get(v, v) for v in op.inputs)))
            operations += self.behind.get(op.name, ())
        return operations

    def _written(self, op: Operation) -> Operation | None:
        """Return the operation that replaces `op`; None if it is removed."""
        if op.kind != "batch_statistics":
            return op
        (x,) = op.inputs
        if x in self.statistics:
            self.renamed.update(zip(op.outputs, self.statistics[x], strict=True))
            return None
        parts = self._parts(x)
        new = {part for part in parts if part not in self.statistics}
        mean, variance = op.outputs
        self.statistics[x] = mean, variance
        if len(new) > 1 or len(parts) == 1 or not self.makers.keys() >= new:  # an input has no maker
            return op
        for part in new:
            self._read(part, op)
        pieces = tuple(name for part in parts for name in self.statistics[part])
        return replace(op, kind="concat_statistics", inputs=pieces)

    def _parts(self, x: str) -> tuple[str, ...]:
        """Return the parts of the concatenation x, not divided further than statistics exist."""
        maker = self.makers.get(x)
        if maker is None or maker.kind != "concat":
            return (x,)
        return tuple(p for part in maker.inputs for p in ((part,) if part in self.statistics else self._parts(part)))

    def _read(self, part: str, op: Operation) -> None:
        """Append statistics of a part after its maker, while the part is in the cache; it need not stay live."""
        pair = (unused_name(f"mean.{part}", self.values), unused_name(f"variance.{part}", self.values))
        for name, like in zip(pair, op.outputs, strict=True):
            of = self.values[like]
            channels = self.values[part].type.shape[1:2]
            self.values[name] = replace(of, name=name, type=replace(of.type, shape=channels))
        name = unused_name(f"statistics.{part}", self.names)
        self.names.add(name)
        reading = Operation(name, op.kind, (part,), pair, NoAttributes(), op.span)
        self.behind.setdefault(self.makers[part].name, []).append(reading)
        self.statistics[part] = pair


def unused_name(name: str, taken: Collection[str]) -> str:
    """Return `name`, with as many underscores appended as it takes to differ from all taken names."""
    while name in taken:
        name += "_"
    return name
