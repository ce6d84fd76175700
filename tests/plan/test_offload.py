"""Plans with copies to the host and recomputation.

Right plans are accepted and give equal results whenever the copies run. Changes that a bug in a search could make are
refused, or change no bit.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from mbc.errors import MbcError
from mbc.hardware.streams import Stream
from mbc.plan.file import dump_plan, load_plan
from mbc.plan.model import Plan
from mbc.plan.verify import verify_plan
from mbc.runtime.launch_order import Transfers, execution_order
from tests.effort import examples
from tests.plan.chains import STREAMS, random_plan
from tests.plan.mutate import KINDS_OF_MUTATIONS, OF_FUSED_OR_WORKSPACE, mutate
from tests.plan.naive import is_right
from tests.plan.offload import copies, offloaded_plan, recomputations
from tests.plan.stepping import results

PLANS = 40
MUTANTS, QUICK = 100, 8  # of each kind
SEEDS = [pytest.param(seed, marks=[pytest.mark.exhaustive] if seed >= 11 else []) for seed in range(PLANS)]


@functools.cache
def valid(seed: int) -> Plan:
    # Every fourth with kernels on all streams, which no GPU runs so, but a wait may be missing in more ways.
    return offloaded_plan(seed, STREAMS if seed % 4 == 3 else (Stream.COMPUTE,))


@functools.cache
def right(seed: int) -> dict[tuple[str, str], bytes]:
    return results(valid(seed), Transfers.IN_ORDER)


def test_the_plans_copy_and_recompute():
    assert sum(copies(valid(seed).train) for seed in range(PLANS)) > 5 * PLANS
    assert sum(recomputations(valid(seed).train) for seed in range(PLANS)) > PLANS
    assert all(valid(seed).predictions.host_bytes for seed in range(PLANS))


@pytest.mark.parametrize("seed", SEEDS)
def test_valid_plans_are_accepted_and_mean_the_same_in_every_schedule(seed):
    plan = valid(seed)
    verified = verify_plan(plan)
    assert verified.live_bytes == plan.bounds.live_bytes
    assert is_right(plan, seed)
    assert load_plan(dump_plan(plan), "p") == plan


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_as_early_and_as_late_as_may_be_change_no_bit(seed):
    plan = valid(seed)
    for mode in (Transfers.EARLY, Transfers.LATE):
        assert results(plan, mode) == right(seed)


def test_the_modes_are_different_orders():
    orders = [{execution_order(valid(seed).train, mode) for mode in Transfers} for seed in range(PLANS)]
    assert sum(len(order) == len(Transfers) for order in orders) > PLANS / 2


def test_recomputing_changes_no_bit_of_a_result():
    """A plan of the same seed without copies and recomputation has equal networks, values, slices and results."""
    for seed in range(0, PLANS, 4):
        kept = random_plan(seed, (Stream.COMPUTE,), layers=2 + seed % 2)
        assert results(kept, Transfers.IN_ORDER) == right(seed)


@pytest.mark.parametrize(
    "seeds", [range(QUICK), pytest.param(range(QUICK, MUTANTS), marks=pytest.mark.exhaustive)], ids=["quick", "others"]
)
@pytest.mark.parametrize("kind", [kind for kind in KINDS_OF_MUTATIONS if kind not in OF_FUSED_OR_WORKSPACE])
def test_mutants_are_refused_or_change_no_bit(kind, seeds):
    """Copies run as soon as waits allow, or as late as they allow."""
    refused = 0
    for seed in seeds:
        mutant = mutate(valid(seed % PLANS), kind, seed)
        try:
            verify_plan(mutant)
        except MbcError:
            refused += 1
            continue
        for mode in (Transfers.EARLY, Transfers.LATE):
            assert results(mutant, mode) == right(seed % PLANS), f"{kind} of plan {seed % PLANS}, seed {seed}, {mode}"
        assert is_right(mutant, seed, 2), f"{kind} of plan {seed % PLANS}, seed {seed}"
    assert refused > 0


@pytest.mark.parametrize("kind", ["drop_wait", "drop_exit", "drop_entry", "change_size"])
def test_mutations_that_always_change_the_meaning_are_always_refused(kind):
    for seed in range(MUTANTS):
        plan = valid(seed % PLANS)
        mutant = mutate(plan, kind, seed)
        if mutant != plan:
            with pytest.raises(MbcError):
                verify_plan(mutant)


def test_every_wait_is_needed_and_its_loss_shows_in_one_of_the_two_modes():
    """Run both modes: without a wait, some copy runs too early or too late for the bytes that it touches."""
    seen = dropped = 0
    for seed in range(examples(12, PLANS)):
        plan = valid(seed)
        for wait in plan.train.waits:
            waits = tuple(w for w in plan.train.waits if w != wait)
            broken = replace(plan, train=replace(plan.train, waits=waits))
            with pytest.raises(MbcError) as caught:
                verify_plan(broken)
            assert caught.value.code == "MBC125"
            dropped += 1
            for mode in (Transfers.EARLY, Transfers.LATE):
                try:
                    if results(broken, mode) != right(seed):
                        seen += 1
                        break
                except MbcError:
                    seen += 1
                    break
    assert seen > dropped / 2
