"""The ledger of live bytes: its bytes are those of the rewritten program, and every decision can be undone."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest

from mbc.optimize.remat.draft_state import RematState
from mbc.optimize.remat.transient_peak import SizedRegions, TransientPeak
from mbc.optimize.remat.undo_log import WorkspaceCut
from mbc.optimize.schedule.regions import Region
from tests.optimize.remat.test_segment_remat import chooser

SEEDS = range(4)
DECISIONS = 12


def decide(state: RematState, rng: random.Random) -> None:
    """Decide to recompute some values that are not used at the launch of peak live bytes."""
    peak = int(np.argmax(state.measured()[1]))
    ledger = state.ledger
    gaps = [gap for b in ledger.movable if ledger.can_recompute(b) and (gap := ledger.gap(b, peak)) is not None]
    for gap in rng.sample(gaps, min(DECISIONS, len(gaps))):
        ledger.recompute_chain(gap.buffer, gap.before)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_ledger_has_the_bytes_of_the_program(seed: int) -> None:
    state = chooser(seed)
    kept = state.measured()[1]
    decide(state, random.Random(seed))
    by_books = kept + state.ledger.delta_bytes
    taken = state.measured()[1]
    assert by_books.max() == taken.max()
    # Which of two values a sum is written over is not followed.
    off_bytes = np.abs(by_books - taken)
    assert off_bytes.max() <= max(state.ledger.size_bytes)
    assert np.count_nonzero(off_bytes > 0.01 * off_bytes.max()) <= 3
    assert np.count_nonzero(taken != kept) > DECISIONS, "little changed: the test shows nothing"


@pytest.mark.parametrize("seed", SEEDS)
def test_undone_decisions_leave_no_trace(seed: int) -> None:
    state = chooser(seed)
    state.measured()
    start = state.ledger.mark()
    decide(state, random.Random(seed))
    state.ledger.measured()
    middle = state.ledger.mark()
    delta_bytes, reads = state.ledger.delta_bytes.copy(), copy.deepcopy(state.ledger.reads)
    state.ledger.cut_workspace(3, WorkspaceCut(1 << 20, 5.0))
    decide_more = random.Random(seed + 100)
    peak = int(np.argmax(state.measure(state.ledger.decisions(), {})[1]))
    ledger = state.ledger
    gaps = [gap for b in ledger.movable if ledger.can_recompute(b) and (gap := ledger.gap(b, peak)) is not None]
    for gap in decide_more.sample(gaps, min(DECISIONS, len(gaps))):
        ledger.recompute_chain(gap.buffer, gap.before)
    assert (state.ledger.delta_bytes != delta_bytes).any() and state.ledger.reads != reads
    state.ledger.undo(middle)
    assert (state.ledger.delta_bytes == delta_bytes).all() and state.ledger.reads == reads
    assert not state.ledger.workspace_cuts
    state.ledger.undo(start)
    decisions = state.ledger.decisions()
    assert not decisions.recomputes
    assert not decisions.offloads
    assert state.ledger.recompute_us == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_gap_is_missed_where_values_are_looked_for(seed: int) -> None:
    """The search for gaps is complete before any decision, after some decisions, and after some of them are undone."""
    state = chooser(seed)
    state.measured()
    ledger = state.ledger

    def looked_at() -> int:
        count = 0
        for position in range(len(state.regions)):
            across = set(ledger.across(position))
            gaps = {b for b in ledger.movable if ledger.gap(b, position) is not None}
            assert gaps <= across
            count += len(across)
        return count

    kept = looked_at()
    start = ledger.mark()
    decide(state, random.Random(seed))
    assert looked_at() < kept
    ledger.undo(start)
    assert looked_at() == kept


def test_recomputation_with_less_workspace_takes_longer_each_time() -> None:
    state = chooser(0)
    decide(state, random.Random(0))
    ledger = state.ledger
    again = ledger.defined_at[ledger.decisions().recomputes[0].buffer]
    assert (ledger.times(again), ledger.times(len(ledger.regions) - 1)) == (2, 1)
    ledger.cut_workspace(again, WorkspaceCut(1 << 20, 5.0))
    assert ledger.workspace_cuts_us() == 5.0 * ledger.times(again)


def region(reads: tuple[int, ...], writes: tuple[int, ...]) -> Region:
    return Region(0, 1, reads, writes, 1.0, True)


def transient_bytes(
    regions: tuple[Region, ...],
    sizes: tuple[int, ...],
    scratch: tuple[int, ...],
    recomputed: set[int],
    staying: set[int],
) -> int:
    """Return the transient bytes before the last region."""
    before = len(regions) - 1
    peak = TransientPeak(sized(regions, sizes, scratch), before)
    peak.update(recomputed, {b for i in recomputed for b in regions[i].writes}, staying)
    return peak.bytes


def sized(regions: tuple[Region, ...], sizes: tuple[int, ...], scratch: tuple[int, ...]) -> SizedRegions:
    defined_at = {b: i for i, region in enumerate(regions) for b in region.writes}
    readers = {b: tuple(i for i, region in enumerate(regions) if b in region.reads) for b in defined_at}
    return SizedRegions(regions, defined_at, readers, sizes, scratch)


def test_values_between_repetitions_are_counted() -> None:
    """Values 0, 1 and 2 are recomputed in turn for the last run, which reads value 2 and writes value 3."""
    regions = (region((), (0,)), region((0,), (1,)), region((1,), (2,)), region((2,), (3,)))
    sizes = (100, 40, 10, 5)
    nothing = (0, 0, 0, 0)
    # While value 1 is computed, value 0 is live; values 2 and 3 are not yet.
    assert transient_bytes(regions, sizes, nothing, {0, 1, 2}, {2}) == 100 + 40 - 10 - 5
    # Values that stay are counted anyway.
    assert transient_bytes(regions, sizes, nothing, {0, 1, 2}, {0, 1, 2}) == 0
    # A repetition has its workspace, and the run has its own.
    assert transient_bytes(regions, sizes, (30, 0, 0, 0), {0}, {0}) == 30 - 5
    assert transient_bytes(regions, sizes, (30, 0, 0, 20), {0}, {0}) == 30 - 20 - 5


@pytest.mark.parametrize("seed", range(20))
def test_a_changed_transient_peak_is_as_if_computed_anew(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randrange(3, 12)
    regions = tuple(region(tuple(sorted(draw.sample(range(i), min(i, draw.randrange(4))))), (i,)) for i in range(count))
    sizes, scratch = (tuple(draw.randrange(100) for _ in range(count)) for _ in range(2))
    peak = TransientPeak(sized(regions, sizes, scratch), count - 1)
    recomputed: set[int] = set()
    staying: set[int] = set()
    for _ in range(40):
        changed = set(draw.sample(range(count - 1), draw.randrange(1, 3)))
        recomputed ^= set(draw.sample(sorted(changed), 1))
        staying = (staying - changed | {b for b in changed if draw.random() < 0.5}) & recomputed
        peak.update(recomputed, changed, staying)
        assert peak.bytes == transient_bytes(regions, sizes, scratch, recomputed, staying)
