"""Batch statistics of a concatenation, concatenated from those of its parts.

Statistics are of one channel each, over the same elements wherever the channel lies: those of a concatenation are those
of its parts one after another. A network that concatenates repeatedly, and normalises each time (Huang et al., "Densely
Connected Convolutional Networks", 2016), would read all channels each time. Instead only the new ones are read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mbc.ir.graph import Operation, Value
from mbc.ops.base import NoAttributes

Pair = tuple[str, str]  # mean and variance


def statistics_by_part(operations: Sequence[Operation], values: dict[str, Value]) -> list[Operation]:
    """`operations` with no `batch_statistics` of what another one has read, and with `concat_statistics` in the place
    of those of a concatenation of which at most one part is new: that one is read where it is made. With two new parts
    there would be more launches than before, so nothing is changed.

    `values` gets `mean.<part>` and `variance.<part>`.
    """
    return _Sharing(operations, values).run()


@dataclass
class _Sharing:
    operations: Sequence[Operation]
    values: dict[str, Value]
    known: dict[str, Pair] = field(default_factory=dict[str, Pair])  # by what they are the statistics of
    renamed: dict[str, str] = field(default_factory=dict[str, str])
    behind: dict[str, list[Operation]] = field(default_factory=dict[str, list[Operation]])  # by who makes what is read

    def __post_init__(self) -> None:
        self.makers: Mapping[str, Operation] = {v: op for op in self.operations for v in op.outputs}
        self.names = {op.name for op in self.operations}

    def run(self) -> list[Operation]:
        kept = [made for op in self.operations if (made := self._written(op)) is not None]
        found: list[Operation] = []
        for op in kept:
            found.append(replace(op, inputs=tuple(self.renamed.get(v, v) for v in op.inputs)))
            found += self.behind.get(op.name, ())
        return found

    def _written(self, op: Operation) -> Operation | None:
        """What stands where `op` stood."""
        if op.kind != "batch_statistics":
            return op
        (x,) = op.inputs
        if x in self.known:
            self.renamed.update(zip(op.outputs, self.known[x], strict=True))
            return None
        parts = self._parts(x)
        new = {part for part in parts if part not in self.known}
        mean, variance = op.outputs
        self.known[x] = mean, variance
        if len(new) > 1 or len(parts) == 1 or not self.makers.keys() >= new:  # an input has no maker
            return op
        for part in new:
            self._read(part, op)
        pieces = tuple(name for part in parts for name in self.known[part])
        return replace(op, kind="concat_statistics", inputs=pieces)

    def _parts(self, x: str) -> tuple[str, ...]:
        """What is concatenated to x, taken apart no further than statistics are wanted."""
        maker = self.makers.get(x)
        if maker is None or maker.kind != "concat":
            return (x,)
        return tuple(p for part in maker.inputs for p in ((part,) if part in self.known else self._parts(part)))

    def _read(self, part: str, op: Operation) -> None:
        """Statistics of a part, beside its maker: the part is in the cache there, and need not live on for them."""
        pair = (_unused(f"mean.{part}", self.values), _unused(f"variance.{part}", self.values))
        for name, like in zip(pair, op.outputs, strict=True):
            of = self.values[like]
            channels = self.values[part].type.shape[1:2]
            self.values[name] = replace(of, name=name, type=replace(of.type, shape=channels))
        name = _unused(f"statistics.{part}", self.names)
        self.names.add(name)
        reading = Operation(name, op.kind, (part,), pair, NoAttributes(), op.span)
        self.behind.setdefault(self.makers[part].name, []).append(reading)
        self.known[part] = pair


def _unused(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "_"
    return name
