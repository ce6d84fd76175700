"""A fusion group: operations of a program, and the launches that may run them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mbc.ir.graph import Operation
from mbc.ops.fused import has_product, names_of


@dataclass(frozen=True, slots=True)
class Group:
    """Operations of a program that a few launches may run.

    Attributes:
        launches: The launches that replace the operations.
        positions: Positions in the program at which the launches run.
        replaces: Names of the operations that the launches replace.
        unstored: Values that are then never stored.
        late: Whether other operations may read unstored values. Such a group may be selected only where other groups
            run those operations without reading the values.
        measured: Whether no estimate predicts the group's time, so that it must have been measured.
        spares_bytes: Bytes of values that another group need not store if this group is selected.
        reads: Values that the launches read.
    """

    launches: tuple[Operation, ...]
    positions: tuple[int, ...]
    replaces: frozenset[str]
    unstored: frozenset[str]
    late: bool = False
    measured: bool = False
    spares_bytes: int = 0
    reads: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Collect the values that the launches read: groups are often compared with one another."""
        object.__setattr__(self, "reads", frozenset(name for launch in self.launches for name in launch.inputs))

    def excludes(self, other: Group) -> bool:
        """Return whether both replace one operation, or one of them reads what the other does not store."""
        if not self.replaces.isdisjoint(other.replaces):
            return True
        return not (self.unstored.isdisjoint(other.reads) and other.unstored.isdisjoint(self.reads))

    @property
    def recomputes(self) -> Mapping[str, tuple[Operation, ...]]:
        """Convolutions, by name, that keep launches of their own and that these launches recompute."""
        launches: dict[str, tuple[Operation, ...]] = {}
        for launch in self.launches:
            product = names_of(launch)[0]
            if has_product(launch.attributes) and product not in self.replaces:
                launches[product] = (*launches.get(product, ()), launch)
        return launches
