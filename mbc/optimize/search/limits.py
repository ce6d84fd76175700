"""The limits of a search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.candidates.user_rules import Rules
from mbc.optimize.fusion.select_groups import Programs
from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.optimize.selection.select import check_limit
from mbc.optimize.selection.workspace_division import divide_workspace
from mbc.options import UNLIMITED_BYTES, Policy


@dataclass(frozen=True, slots=True)
class Limits:
    """Everything that limits a search; UNLIMITED_BYTES or more is no limit.

    Attributes:
        budget_bytes: Device memory that the plan may use, with the overhead.
        operation_bytes: Workspace of one operation.
        total_bytes: Workspace of all operations of a program together.
        host_bytes: Host memory that a plan may pin.
        peer_bytes: Memory of another GPU.
        without: Techniques that are not used, of mbc.options.TECHNIQUES.
        slowest_us: Limit on the time of a training step in microseconds; the search abandons slower steps.
    """

    budget_bytes: int = UNLIMITED_BYTES
    operation_bytes: int = UNLIMITED_BYTES
    total_bytes: int = UNLIMITED_BYTES
    host_bytes: int = UNLIMITED_BYTES
    peer_bytes: int = 0
    without: frozenset[str] = frozenset()
    slowest_us: float = math.inf

    def techniques(self, rules: Rules) -> AllowedTechniques:
        """Return the techniques that may be used where not all values fit."""
        # Depth-first execution relies on recomputation in the backward pass.
        recompute = "recompute" not in self.without
        split = recompute and rules.policy is not Policy.UNDIVIDED and not rules.micro_batch
        offload = 0.0 if "offload" in self.without else 1.0
        return AllowedTechniques(recompute, offload, self.host_bytes, split, peer_bytes=self.peer_bytes)

    def of_workspaces(self, table: CandidateTable, programs: Programs) -> Mapping[str, int]:
        """Return the limit of each operation's workspace by name, independent of the bytes that are free.

        Raises:
            MbcError: MBC201, if a limit is too small for an operation.
        """
        if self.operation_bytes < UNLIMITED_BYTES:
            check_limit(table, self.operation_bytes)
        # Without workspace each operation takes the smallest one.
        most_bytes = 0 if "workspace" in self.without else self.operation_bytes
        limits = {operation.name: most_bytes for operation in (*programs.train, *programs.infer)}
        if self.total_bytes < UNLIMITED_BYTES:
            graph = table.graph
            shares = dict(divide_workspace(table, programs.train, graph.inputs, self.total_bytes))
            shares |= divide_workspace(table, programs.infer, graph.infer_inputs, self.total_bytes)
            limits |= {name: min(part, limits[name]) for name, part in shares.items()}
        return limits
