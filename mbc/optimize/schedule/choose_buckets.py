"""The choice of gradient buckets: how many collectives sum the gradients, in which order, and with how many blocks."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.kernels.nccl import BY_COPIES, GATHERS, SHARDED, divides_among
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.schedule.contention import contention
from mbc.optimize.schedule.cross_stream_liveness import data_waits_only
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.gradient_buckets import Collective, bucketings, with_buckets
from mbc.optimize.schedule.liveness import owners
from mbc.optimize.schedule.simulate import simulate


@dataclass(frozen=True, slots=True)
class Buckets:
    """The collectives of all steps of one search, in order, and the number of thread blocks of each.

    Attributes:
        collectives: The collectives.
        ctas: Thread blocks of each.
    """

    collectives: tuple[Collective, ...]
    ctas: int

    def applied(self, table: CandidateTable, draft: Draft) -> Draft:
        """Return the draft with gradients summed over ranks in these buckets."""
        return with_buckets(draft, self.collectives, self.ctas, table.graph, table.device)


def choose_buckets(table: CandidateTable, draft: Draft) -> Buckets | None:
    """Return the buckets that another rank's plan has, or those predicted to make a step shortest; None if alone.

    The order is chosen first, then the number of thread blocks. Other steps of the search have the same buckets, since
    later choices hardly change when gradients are ready.

    Args:
        table: Candidates of the graph.
        draft: The step, with a launch for the sum of each gradient.
    """
    ranks, rules = table.graph.ranks, table.rules
    if ranks is None:
        return None
    if rules.collectives:
        return Buckets(rules.collectives, rules.ctas)
    # Copies reach the same address in the memory of every rank, so all ranks need one plan; and copies gather nothing.
    gathers = any(operation.kind in (*GATHERS, *SHARDED) for operation in table.graph.train)
    one_plan = len(ranks.members) == ranks.size
    copies = divides_among(ranks.size) and one_plan and not gathers
    choices = [c for c in table.device.collectives.choices(ranks.size) if c != BY_COPIES or copies]

    def step_us(buckets: Buckets) -> float:
        bucketed = buckets.applied(table, draft)
        train = data_waits_only(bucketed.train, bucketed.buffers, owners(bucketed.buffers))
        return simulate(train, contention=contention(train, table.graph, bucketed.buffers, table.device))

    # In another rank's plan a bucket may be ready after a gather that it precedes here; but all need the same order.
    ways = tuple(bucketings(draft, held_back=gathers and not one_plan))
    best = min((Buckets(collectives, max(choices)) for collectives in ways), key=step_us)
    best = min((Buckets(best.collectives, ctas) for ctas in choices), key=step_us)
    # Buckets that suit one number of thread blocks suit others; copies may need other buckets.
    kept = {best.ctas, *(c for c in choices if c == BY_COPIES)}
    return min((Buckets(collectives, ctas) for ctas in sorted(kept) for collectives in ways), key=step_us)
