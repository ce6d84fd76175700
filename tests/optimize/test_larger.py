"""What planning takes from larger sizes of a profile, and that it stands beside no fact without evidence."""

from __future__ import annotations

import pytest

from mbc.device.profile import Extent, Measurement, Profile
from mbc.ir.graph import Operation
from mbc.kernels import PROVIDERS
from mbc.kernels.base import Candidate
from mbc.kernels.calibration import calibration, scaled_group
from mbc.optimize.candidates import Basis, CandidateTable
from mbc.optimize.fuse import all_groups, fuse, plain
from mbc.optimize.larger import size_of
from mbc.optimize.ranges import time_range_us
from mbc.optimize.search import Limits, search
from mbc.plan.model import Kernel, Program, Rows
from tests.device.profiles import profile
from tests.optimize.planned import H200, graph_of

SOURCE = """
network small(batch = 16, classes = 4) {
  input image[batch, 64, 14, 14] : float
  input target[batch] : class
  x = image |> conv(64, 3, pad=1, bias=true) @first |> relu |> conv(64, 3, pad=1, bias=true) |> relu
  logits = x |> global_avgpool |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd() }
"""
SLOWER = 1.5  # than estimated
HALVES = "convolution_in_halves"
EARLY, LATE = "2026-11-21T12:00:00", "2026-11-22T12:00:00"


def table(batch: int, known: Profile | None = None) -> CandidateTable:
    return CandidateTable(graph_of(SOURCE, batch), H200, PROVIDERS, known)


def measured(candidate: Candidate, time_us: float) -> Measurement:
    c = candidate
    return Measurement(
        c.provider, c.name, c.settings, c.layouts, c.workspace_bytes, time_us, 0.0, True, c.accumulates, (), 0.0
    )


def step_at(rows: int, groups: bool = True) -> Profile:
    """All that a step of so many rows may launch, at `SLOWER` times the estimates."""
    at = table(rows)
    launches = (*at.graph.train, *at.graph.infer)
    if groups:
        launches += tuple(launch for group in all_groups(at) for launch in group.launches)
    requests = {at.request(o, at.whole): at.offered(o) for o in launches}
    return profile({r: [measured(c, SLOWER * c.time_us) for c in found] for r, found in requests.items() if found})


def first(made: CandidateTable) -> Operation:
    return next(o for o in made.graph.train if o.kind == "convolution")


def test_fewer_rows_are_told_by_the_nearest_size():
    made, estimated = table(16, step_at(64)), table(16)
    for operation in (first(made), next(o for o in made.graph.train if o.kind == "relu")):
        assert made.basis(operation) is Basis.LARGER_SIZE and not made.timed(operation)
        found, models = (
            {(c.name, c.layouts): c for c in t.candidates(operation, t.whole) if c.provider == "mbc"}
            for t in (made, estimated)
        )
        assert found.keys() == models.keys() and not any(c.measured for c in found.values())
        for key, candidate in found.items():
            assert candidate.time_us == pytest.approx(SLOWER * models[key].time_us)
    assert table(16, step_at(16)).basis(first(made)) is Basis.PROFILE
    assert table(16, step_at(8)).basis(first(made)) is Basis.ESTIMATE
    assert table(2, step_at(64)).basis(first(table(2))) is Basis.ESTIMATE  # too far


def test_estimated_groups_do_not_stand_beside_operations_of_a_larger_size():
    assert fuse(table(16)) != plain(table(16).graph)
    assert fuse(table(16, step_at(64, groups=False))) == plain(table(16).graph)
    assert fuse(table(16, step_at(64))) == fuse(table(16))


def parts(here_us: float, here_date: str, there_date: str) -> Profile:
    """The first convolution at 4 rows, by a library, and at 8, where a kernel of mbc's own takes 100 us."""
    made = table(16)
    requests = {rows: made.request(first(made), Rows(0, rows)) for rows in (4, 8)}
    library = next(c for c in made.candidates(first(made), Rows(0, 4)) if c.provider == "cudnn")
    own = next(c for c in made.candidates(first(made), Rows(0, 8)) if c.name == HALVES)
    return profile(
        {requests[4]: [measured(library, here_us)], requests[8]: [measured(library, 300.0), measured(own, 100.0)]},
        {requests[4]: Extent(1 << 30, date=here_date), requests[8]: Extent(1 << 30, date=there_date)},
    )


def names(batch: int, known: Profile) -> set[str]:
    made = table(batch, known)
    return {c.name for c in made.candidates(first(made), Rows(0, 4)) if c.provider == "mbc"}


def test_a_kernel_that_came_later_is_told_by_a_larger_size():
    assert HALVES in names(16, parts(150.0, EARLY, LATE))
    found = table(16, parts(150.0, EARLY, LATE)).candidates(first(table(16)), Rows(0, 4))
    (newer,) = (c for c in found if c.name == HALVES)
    assert 50.0 <= newer.time_us < 100.0 and not newer.measured


def test_but_beside_facts_only_where_it_would_win_at_the_upper_end_of_its_range():
    model = table(16)
    shares = [
        next(c.time_us for c in model.candidates(first(model), Rows(0, rows)) if c.name == HALVES) for rows in (4, 8)
    ]
    expected_us = 100.0 * max(0.5, shares[0] / shares[1])
    _, high = calibration().factors(calibration().spreads[scaled_group("mbc", 2)], H200)
    assert high > 1
    assert HALVES in names(16, parts(1.001 * high * expected_us, EARLY, LATE))
    assert HALVES not in names(16, parts(0.999 * high * expected_us, EARLY, LATE))


def test_and_not_where_it_could_have_been_measured_or_for_the_whole_batch():
    for dates in ((LATE, EARLY), (EARLY, EARLY), ("", LATE)):
        assert HALVES not in names(16, parts(150.0, *dates))
    assert HALVES not in names(4, parts(150.0, EARLY, LATE))


def test_from_which_size_a_time_is():
    made, known = table(16), step_at(64)
    relu = next(o for o in made.graph.train if o.kind == "relu")
    kernel = Kernel("mbc", "relu", (), 1.0, False)
    at = {rows: made.request(relu, Rows(0, rows)) for rows in (2, 4, 8, 16)}
    assert size_of(known, at[4], kernel) == size_of(known, at[16], kernel) == 64
    assert size_of(known, at[2], kernel) is None
    assert size_of(known, at[4], Kernel("mbc", "no_such_kernel", (), 1.0, False)) is None
    both = profile({r: [measured(c, 1.0) for c in made.candidates(relu, Rows(0, n))] for n, r in at.items() if n != 8})
    assert size_of(both, at[8], kernel) is size_of(both, at[4], kernel) is None  # interpolated, measured


def test_the_range_of_a_step_is_that_of_times_from_a_larger_size():
    known = step_at(64)
    made = table(16, known)
    plan = search(made, Limits(without=frozenset(("beside",))), 1 << 40)
    train, predictions = plan.train, plan.predictions
    launch = next(x for x in train.launches if x.operations == (first(made).name,))
    spread = calibration().spreads[scaled_group("mbc", 4)]
    low, high = calibration().factors(spread, H200)
    alone = Program((launch,), (), (), ())
    found = time_range_us(alone, plan.graph, plan.buffers, H200, known, plan.graph.train)
    assert found == pytest.approx((low * launch.work.time_us, high * launch.work.time_us))
    told = time_range_us(train, plan.graph, plan.buffers, H200, known, plan.graph.train)
    assert told == (predictions.train_low_us, predictions.train_high_us)
