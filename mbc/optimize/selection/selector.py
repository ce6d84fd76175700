"""The selector of one table: choices of kernels and of fusion groups, each made once.

A fusion group may save less than its changes of layout cost where launches exist in one layout only. So groups are
chosen with each launch in its best layout, and again with all images in one layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from mbc.ir.types import Layout
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.select_groups import Fusion, Programs, plain
from mbc.optimize.selection.select import Choices, choose
from mbc.options import UNLIMITED_BYTES

_Groups = tuple[int, frozenset[int]]  # the workspace that a launch may need, and the groups that are left out
_Key = tuple[tuple[tuple[str, tuple[str, ...], int, int | None], ...], bool | None]


@dataclass(frozen=True, eq=False)
class Selector:
    """Choices for the graph of one table, with its fusion groups."""

    fusion: Fusion
    _choices: dict[_Key, Choices] = field(default_factory=dict[_Key, Choices])
    _fastest: dict[_Groups, Programs] = field(default_factory=dict[_Groups, Programs])

    @staticmethod
    def of(table: CandidateTable) -> Selector:
        """Return the selector of a table."""
        return Selector(Fusion.of(table))

    @property
    def table(self) -> CandidateTable:
        """Candidates of the graph."""
        return self.fusion.table

    @cached_property
    def unlimited(self) -> Choices:
        """The fastest choices without a limit."""
        return self.choose({}, programs=self.fastest_fused())

    def choose(
        self,
        limits: Mapping[str, int],
        rows: Mapping[str, int] | None = None,
        programs: Programs | None = None,
        updates: bool = True,
    ) -> Choices:
        """Return the choices of `mbc.optimize.selection.select.choose`."""
        divided, chosen = rows or {}, programs or plain(self.table.graph)
        limited = tuple(
            (o.name, o.outputs, min(limits.get(o.name, UNLIMITED_BYTES), UNLIMITED_BYTES), divided.get(o.name))
            for o in (*chosen.train, *chosen.infer)
        )
        key = limited, updates if programs is not None else None
        if key not in self._choices:
            self._choices[key] = choose(self.table, limits, rows, programs, updates)
        return self._choices[key]

    def fastest_fused(self, limit_bytes: int = UNLIMITED_BYTES, held_bytes: int = UNLIMITED_BYTES) -> Programs:
        """Return both programs with the fusion groups that make them fastest, in the layouts chosen without a limit.

        Args:
            limit_bytes: Workspace that a launch may need.
            held_bytes: Bytes that a group may keep live for longer than its operations one by one would.
        """
        key = limit_bytes, self.fusion.long(held_bytes)
        if key not in self._fastest:
            fused = dict.fromkeys(self.fusion.programs(limit_bytes, layout, key[1]) for layout in (None, *Layout))
            self._fastest[key] = min(fused, key=lambda programs: self.choose({}, programs=programs).train_us)
        return self._fastest[key]
