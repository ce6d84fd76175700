"""The ladder of mini-batches, the table and the choice; arithmetic replaces planning."""

from __future__ import annotations

import pytest

from mbc.errors import BudgetError, MbcError
from mbc.fit import Figures, Probe
from mbc.plan.model import Plan
from mbc.report.tune import tune_document, tune_text
from mbc.tune import batch_ladder as ladder
from mbc.tune.goodput import Base, Table, Tried, table
from mbc.tune.noise_scale import efficiency, gain
from mbc.tune.rates import rate_factor, rescaled
from mbc.tune.tuner import Spending
from mbc.tune.tuning_file import State


def figures(batch: int, us: float | None = None) -> Figures:
    """Return the figures of a step of 100 us and 1 us for each row."""
    us = 100.0 + batch if us is None else us
    return Figures(batch, 10**9, 10**6 * batch, 10**6 * batch, 0, 1, us, us, 1.0, batch * 1e6 / us)


@pytest.fixture
def climbed(monkeypatch):
    """Return a function that climbs with at most `largest` rows in memory, and returns probes and planned batches."""
    monkeypatch.setattr("mbc.fit.figures", lambda plan: figures(plan))

    def climb(largest, base=64, gpus=1, **more):
        asked: list[int] = []

        def plan_at(batch: int) -> Plan:
            asked.append(batch)
            if batch > largest:
                raise BudgetError("MBC204", "too much", "", needed_bytes=10**6 * batch, floor_bytes=10)
            return batch  # pyright: ignore[reportReturnType]: `figures` takes it

        return ladder.climb(plan_at, base, gpus, **more), asked

    return climb


def test_it_doubles_while_it_fits_and_halves_down(climbed):
    probes, asked = climbed(700)
    assert [p.at for p in probes if p.figures is not None] == [8, 16, 32, 64, 128, 256, 512]
    assert [p.at for p in probes if p.figures is None] == [768, 1024] and len(asked) == len(set(asked))
    probes, _ = climbed(800)
    assert max(p.at for p in probes if p.figures is not None) == 768, "a half above the last that fits"


def test_no_batch_has_more_rows_than_the_data(climbed):
    probes, _ = climbed(10**6, most=300)
    assert max(p.at for p in probes) == 256
    probes, _ = climbed(10**6, base=64, most=40)
    assert max(p.at for p in probes) == 40


def test_it_ends_where_goodput_no_longer_rises(climbed):
    probes, _ = climbed(10**9)
    assert max(p.at for p in probes) == 1 << 15, "images/s do not, beyond 1 % a doubling"
    probes, _ = climbed(10**9, row_value=lambda batch: efficiency(50, 64, batch))
    assert max(p.at for p in probes) == 256, "two doublings"


def test_where_the_base_does_not_fit_smaller_ones_are_tried(climbed):
    probes, _ = climbed(3)
    assert [p.at for p in probes if p.figures is not None] == [2], "the first that does"
    with pytest.raises(MbcError, match=r"MBC194: nothing fits, not even a batch of 1"):
        climbed(0)


def test_several_gpus_share_every_batch(climbed):
    assert (
        ladder.gpu_counts(1) == (1,) and ladder.gpu_counts(6) == (1, 2, 4, 6) and ladder.gpu_counts(8) == (1, 2, 4, 8)
    )
    probes, _ = climbed(700, gpus=3)
    assert [p.at for p in probes if p.figures is not None][-1] == 504 and all(p.at % 3 == 0 for p in probes)


def _table(noise_scale: float | None, batches=(16, 32, 64, 128, 256), rule="adascale") -> tuple[Table, Base]:
    base = Base(64, 1, 0.1, rule, 0.9)
    tried = [Tried(1, Probe(b, figures(b))) for b in batches]
    refused = Probe(512, None, BudgetError("MBC204", "too much", "", needed_bytes=9, floor_bytes=9))
    return table([*tried, Tried(1, refused)], base, noise_scale), base


def test_goodput_is_images_a_second_times_efficiency_and_most_of_it_is_taken():
    rows_of_batches, _ = _table(100.0)
    for row in rows_of_batches.fitting:
        assert row.goodput == pytest.approx(row.batch * 1e6 / (100 + row.batch) * efficiency(100.0, 64, row.batch))
        assert (row.rate, row.momentum) == rescaled("adascale", gain(100.0, 64, row.batch), 0.1, 0.9)
    assert rows_of_batches.taken.goodput == max(row.goodput for row in rows_of_batches.fitting)
    assert _table(1e9)[0].taken.batch == 256, "where rows are noise the fastest"
    assert _table(1e-9)[0].taken.batch == 16, "where they are not the one with most steps"
    assert _table(None)[0].taken.batch == 256 and _table(None)[0].taken.rate is None


def test_the_smaller_batch_on_fewer_gpus_wins_a_tie():
    base = Base(64, 1, None, "linear")
    tried = [Tried(gpus, Probe(batch, figures(64))) for gpus, batch in ((2, 64), (1, 64), (2, 64))]
    assert table(tried, base, None).taken.gpus == 1


def test_equally_good_epochs():
    rows_of_batches, base = _table(64.0)
    by_batch = {row.batch: row for row in rows_of_batches.fitting}
    assert by_batch[64].epochs(10, base, None) == 10 and by_batch[16].epochs(10, base, None) == 10
    assert by_batch[256].epochs(10, base, None) == 25, "a row is worth 128 / 320 of one of the base batch"
    assert by_batch[256].epochs(10, base, 512) == 25, "an epoch has all rows at either batch"
    assert by_batch[256].epochs(10, base, 448) == 44, "and here 256 of the 448 that the base batch has"
    assert by_batch[16].epochs(10, base, 80) == 10
    assert by_batch[256].epochs(10, base, 5) == 10, "data of fewer rows than a step"


def test_rules():
    assert rate_factor("linear", None, 64, 256) == 4 and rate_factor("sqrt", None, 64, 256) == 2
    assert rate_factor("adascale", None, 64, 256) is None
    assert rate_factor("adascale", 64.0, 64, 256) == pytest.approx(4 * 128 / 320)


def _descent(rate: float, momentum: float, steps: int) -> list[float]:
    """Return the weight after each step of gradient descent with momentum on `w^2 / 2`, from 1."""
    weights, velocity = [1.0], 0.0
    for _ in range(steps):
        velocity = momentum * velocity + weights[-1]
        weights.append(weights[-1] - rate * velocity)
    return weights


@pytest.mark.parametrize("rate", [0.001, 0.004, 0.007])
@pytest.mark.parametrize("factor", [1.5, 2.0, 3.0, 4.0])
def test_a_step_replaces_as_many_steps_as_its_factor_with_momentum_too(rate, factor):
    base = _descent(rate, 0.9, round(40 * factor))
    new_rate, momentum = rescaled("adascale", factor, rate, 0.9)

    def apart(weights: list[float]) -> float:
        return max(abs(weight - base[round(n * factor)]) for n, weight in enumerate(weights))

    assert apart(_descent(new_rate, momentum, 40)) < 0.07
    assert apart(_descent(rate * factor, 0.9, 40)) > 3 * apart(_descent(new_rate, momentum, 40)), "momentum as before"


def test_momentum_of_other_rules_and_optimizers_stays():
    assert rescaled("linear", 4.0, 0.1, 0.9) == (pytest.approx(0.4), 0.9)
    assert rescaled("adascale", 4.0, 0.1, 0.0) == (pytest.approx(0.4), 0.0)
    assert rescaled("adascale", 1.0, 0.1, 0.9) == (pytest.approx(0.1), pytest.approx(0.9))


def test_what_is_said():
    rows_of_batches, base = _table(100.0)
    shown = tune_text(rows_of_batches, base, State({}), Spending(1000, 100, 50))
    assert f"takes batch {rows_of_batches.taken.batch}: most goodput, " in shown and "15.0% of the 1,000" in shown
    assert "MBC204" in shown and "base" in shown
    document = tune_document(rows_of_batches, base, State({}), None)
    assert document["taken"]["batch"] == rows_of_batches.taken.batch and document["rows"][-1]["fits"] is False
    assert "The efficiency of larger batches is unknown" in tune_text(*_table(None), State({}), None)
    assert rows_of_batches.taken.momentum is not None and 0 < rows_of_batches.taken.momentum < base.momentum == 0.9
    assert f"its rate is for momentum {rows_of_batches.taken.momentum:.3g}, not 0.9" in shown
    alone, base = _table(100.0, (64,))
    assert tune_text(alone, base, State({}), None).endswith("takes batch 64: the only one that fits")
