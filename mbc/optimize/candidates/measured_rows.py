"""The numbers of rows for which a profile has measured a network."""

from __future__ import annotations

from collections import Counter

from mbc.ir.graph import TrainingGraph
from mbc.ops.fused import kind_of
from mbc.optimize import effort
from mbc.optimize.candidates.table import request_of
from mbc.plan.model import Rows
from mbc.profile.model import Profile


def measured_rows(graph: TrainingGraph, profile: Profile | None) -> frozenset[int]:
    """Return the numbers of rows for which most operations on rows were measured, if any were."""
    if profile is None:
        return frozenset()
    counts: Counter[int] = Counter()
    operations, whole = 0, Rows(0, graph.batch)
    for operation in graph.train:
        operands = (*operation.inputs, *operation.outputs)
        if kind_of(operation).view or not any(graph.values[name].per_sample for name in operands):
            continue
        family = profile.family(request_of(graph, operation, whole))
        sizes = [rows for rows, candidates in family.items() if any(c.measured for c in candidates)]
        counts.update(sizes)
        operations += bool(sizes)
    return frozenset(rows for rows, count in counts.items() if count >= effort.MEASURED_SHARE * operations)
