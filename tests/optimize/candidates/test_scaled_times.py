"""Times that planning scales from other measured sizes, and how well these predict them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mbc.hardware.spec import find_spec
from mbc.ir.graph import Operation
from mbc.kernels.base import Candidate
from mbc.kernels.calibration import INTERPOLATED, calibration, scaled_group
from mbc.kernels.providers import PROVIDERS
from mbc.optimize import effort
from mbc.optimize.candidates import user_rules
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.search.prediction_interval import Timing, time_range_us
from mbc.optimize.search.profiling_requests import outdated
from mbc.optimize.search.search import Limits, search
from mbc.options import Policy
from mbc.plan.model import Kernel, Program, Rows
from mbc.profile.model import Extent, Measurement, Outdated, Profile, scaled_to
from mbc.profile.signature import signature
from tests.optimize.planned import H200, graph_of
from tests.profile.profiles import profile

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
UNDIVIDED = Rules()
SLOWER = 1.5  # than estimated
H100 = find_spec("h100")
HALVES = "fp32_emulated_conv"
EARLY, LATE = "2026-11-21T12:00:00", "2026-11-22T12:00:00"


def table(batch: int, own_profile: Profile | None = None, rules: Rules = UNDIVIDED) -> CandidateTable:
    return CandidateTable(graph_of(SOURCE, batch), H200, PROVIDERS, own_profile, rules)


def measured(candidate: Candidate, time_us: float) -> Measurement:
    c = candidate
    return Measurement(
        c.provider, c.name, c.settings, c.layouts, c.workspace_bytes, time_us, 0.0, True, c.accumulates, (), 0.0
    )


def step_at(rows: int) -> Profile:
    """Return a profile of all launches of a step with `rows` rows, at `SLOWER` times the estimates."""
    at = table(rows)
    requests = {at.request(o, at.whole): at.offered(o) for o in (*at.graph.train, *at.graph.infer)}
    return profile({r: [measured(c, SLOWER * c.time_us) for c in offers] for r, offers in requests.items() if offers})


def first(scaled_table: CandidateTable, kind: str = "convolution") -> Operation:
    return next(o for o in scaled_table.graph.train if o.kind == kind)


def own(candidates: tuple[Candidate, ...]) -> dict[object, Candidate]:
    return {(c.name, c.layouts): c for c in candidates if c.provider == "mbc"}


@pytest.mark.parametrize("kind", ["convolution", "relu"])
def test_micro_batches_use_the_nearest_size(kind: str):
    scaled_table, estimated = table(128, step_at(64)), table(128)
    operation = first(scaled_table, kind)
    times, models = (own(t.candidates_of_micro_batch(operation, Rows(0, 16))) for t in (scaled_table, estimated))
    assert times and times.keys() == models.keys()
    for key, candidate in times.items():
        assert candidate.time_us == pytest.approx(SLOWER * models[key].time_us) and not candidate.measured
    assert own(scaled_table.candidates_of_micro_batch(operation, Rows(0, 2))) == own(
        estimated.candidates(operation, Rows(0, 2))
    )
    assert all(c.measured for c in own(scaled_table.candidates_of_micro_batch(operation, Rows(0, 64))).values())


@pytest.mark.parametrize("batch", [16, 128])
@pytest.mark.parametrize("kind", ["convolution", "relu", "channel_sum"])
def test_a_whole_batch_is_scaled_from_the_nearest_size(kind: str, batch: int):
    scaled_table, estimated = table(batch, step_at(64)), table(batch)
    operation = first(scaled_table, kind)
    times, models = (own(t.candidates(operation, t.whole)) for t in (scaled_table, estimated))
    assert scaled_table.timed(operation) and times and times.keys() == models.keys()
    for key, candidate in times.items():
        assert candidate.time_us == pytest.approx(SLOWER * models[key].time_us) and not candidate.measured


def test_a_whole_batch_is_scaled_from_no_size_far_away():
    scaled_table = table(4096, step_at(64))
    assert not scaled_table.timed(first(scaled_table))
    assert scaled_table.candidates(first(scaled_table), scaled_table.whole) == table(4096).candidates(
        first(scaled_table), scaled_table.whole
    )


def test_parts_compete_with_a_whole_scaled_from_the_same_size():
    """The measured size is larger than the mini-batch.

    Micro-batches scaled from it take at least their share of its time.

    So nothing is divided.
    """
    own_profile = step_at(64)
    for layouts, front in table(16, own_profile, Rules(Policy.POWER_OF_TWO)).fronts(first(table(16))).items():
        fastest = min(front, key=lambda point: point.time_us)
        assert [part.rows for part in fastest.micro_batches] == [16], layouts
    scaled_table, estimated = table(16, own_profile), table(16)
    assert scaled_table.fronts_in_micro_batches(first(scaled_table), 4) != estimated.fronts_in_micro_batches(
        first(scaled_table), 4
    )


def test_excluded_kernels_decide_nothing():
    """The fastest kernel of a smaller batch is an engine that the rules exclude.

    Other kernels are scaled nevertheless.
    """
    small, rules = table(16), Rules(deterministic=True)
    operation = first(small)
    by_name = own(small.candidates(operation, small.whole))
    kernel = next(c for c in by_name.values() if c.name == HALVES)
    engine = next(c for c in small.candidates(operation, small.whole) if c.provider == "cudnn")
    fastest = replace(measured(engine, 1.0), settings=(("engine", 3),), deterministic=False)
    own_profile = profile({small.request(operation, small.whole): [fastest, measured(kernel, 100.0)]})
    free, strict = (table(64, own_profile, allowed) for allowed in (UNDIVIDED, rules))
    assert not free.has_profiled_time(first(free)) and strict.has_profiled_time(first(strict))
    assert [c.name for c in strict.candidates(first(strict), strict.whole) if c.time_us < 401.0][:1] == [HALVES]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [((32,), scaled_group("mbc", 2)), ((32, 128), INTERPOLATED), ((4, 128), scaled_group("mbc", 16))],
    ids=["from one size", "between", "far apart"],
)
def test_the_range_of_a_whole_batch(rows: tuple[int, ...], expected: str):
    measured_at = {k: v for n in rows for k, v in step_at(n).measurements.items()}
    own_profile = replace(step_at(rows[0]), measurements=measured_at)
    scaled_table = table(64, own_profile)
    relu = first(scaled_table, "relu")
    candidate = own(scaled_table.candidates(relu, scaled_table.whole)).popitem()[1]
    kernel = Kernel(candidate.provider, candidate.name, candidate.settings, candidate.time_us, False)
    assert scaled_table.other_sizes is not None
    assert (
        scaled_table.other_sizes.spread(scaled_table.request(relu, scaled_table.whole), kernel)
        == calibration().spreads[expected]
    )


@pytest.mark.parametrize(("rows", "share"), [(16, effort.SCALED_OPTIMISM), (8, effort.OPTIMISM)])
def test_deciding_times_of_farther_sizes_count_less(rows: int, share: float):
    own_profile = step_at(rows)
    plain = table(64, own_profile)
    relu = first(plain, "relu")
    optimistic = CandidateTable(plain.graph, H200, PROVIDERS, own_profile, UNDIVIDED, optimism=effort.OPTIMISM)
    before, after = (own(t.candidates(relu, t.whole)) for t in (plain, optimistic))
    for key, candidate in before.items():
        assert after[key].time_us == pytest.approx(share * candidate.time_us) and after[key].measured


@pytest.mark.parametrize(("rows", "is_near"), [((16,), True), ((8, 16), True), ((256, 512), True), ((8, 512), False)])
def test_one_near_size_among_others_suffices(rows: tuple[int, ...], is_near: bool):
    measured_at = {k: v for n in rows for k, v in step_at(n).measurements.items()}
    scaled_table = table(64, replace(step_at(rows[0]), measurements=measured_at))
    assert scaled_table.other_sizes is not None and effort.NEAR_TIMES == 4
    request = scaled_table.request(first(scaled_table), scaled_table.whole)
    assert scaled_table.other_sizes.is_near(request) == is_near


def parts(here_us: float, here_date: str, there_date: str) -> Profile:
    """Return a profile of the first convolution: 4 rows by a library, 8 rows by a library and a kernel of mbc."""
    scaled_table = table(16)
    requests = {rows: scaled_table.request(first(scaled_table), Rows(0, rows)) for rows in (4, 8)}
    library = next(c for c in scaled_table.candidates(first(scaled_table), Rows(0, 4)) if c.provider == "cudnn")
    halves = own(scaled_table.candidates(first(scaled_table), Rows(0, 8)))
    (kernel,) = (c for c in halves.values() if c.name == HALVES)
    return profile(
        {requests[4]: [measured(library, here_us)], requests[8]: [measured(library, 300.0), measured(kernel, 100.0)]},
        {requests[4]: Extent(1 << 30, date=here_date), requests[8]: Extent(1 << 30, date=there_date)},
    )


def newer(own_profile: Profile, batch: int = 16, rows: int = 4) -> list[Candidate]:
    scaled_table = table(batch, own_profile)
    return [c for c in scaled_table.candidates_of_micro_batch(first(scaled_table), Rows(0, rows)) if c.name == HALVES]


def test_a_later_kernel_is_recognised_by_a_size_measured_later():
    (candidate,) = newer(parts(150.0, EARLY, LATE))
    assert 50.0 <= candidate.time_us < 100.0 and not candidate.measured
    for dates in ((LATE, EARLY), (EARLY, EARLY), ("", LATE)):  # it could have been measured
        assert not newer(parts(150.0, *dates))
    assert newer(parts(150.0, EARLY, LATE), batch=4) == [candidate]  # the same for a whole


def test_beside_facts_only_where_it_would_win_at_the_upper_end_of_its_range():
    (candidate,) = newer(parts(1e6, EARLY, LATE))
    _, high = calibration().factors(calibration().spreads[scaled_group("mbc", 2)], H200)
    assert high > 1
    assert newer(parts(1.001 * high * candidate.time_us, EARLY, LATE))
    assert not newer(parts(0.999 * high * candidate.time_us, EARLY, LATE))
    (fewer,) = newer(parts(1e6, EARLY, LATE), rows=2)  # also beside the time that follows from a size without it
    assert fewer.time_us < candidate.time_us


def test_the_range_is_that_of_the_provider_at_as_many_times_the_rows():
    scaled_table = table(128, step_at(64))
    relu = first(scaled_table, "relu")
    candidate = own(scaled_table.candidates_of_micro_batch(relu, Rows(0, 16))).popitem()[1]
    kernel = Kernel(candidate.provider, candidate.name, candidate.settings, candidate.time_us, False)
    assert scaled_table.other_sizes is not None
    request = scaled_table.request(relu, Rows(0, 16))
    spread = scaled_table.other_sizes.spread(request, kernel)
    assert spread == calibration().spreads[scaled_group("mbc", 4)]
    assert (
        scaled_table.other_sizes.spread(request, Kernel("mbc", "relu", (), 1e9, False)) is None
    )  # estimated otherwise
    assert scaled_table.other_sizes.spread(scaled_table.request(relu, Rows(0, 64)), kernel) is None


def test_a_step_in_micro_batches_has_that_range():
    scaled_table = table(128, step_at(64), Rules(micro_batch=16))
    plan = search(scaled_table, Limits(1 << 40, without=frozenset(("concurrent_stream",))))
    launch = next(x for x in plan.train.launches if x.operations == (first(scaled_table).name,))
    assert isinstance(launch.work, Kernel)
    alone = Program((launch,), (), (), ())
    low, high = calibration().factors(calibration().spreads[scaled_group(launch.work.provider, 4)], H200)
    timing = Timing.of(scaled_table, plan.buffers, plan.graph.train)
    range_us = time_range_us(alone, timing, H200)
    assert range_us == pytest.approx((low * launch.work.time_us, high * launch.work.time_us))
    whole_range_us = time_range_us(plan.train, timing, H200)
    assert whole_range_us == (plan.predictions.train_low_us, plan.predictions.train_high_us)


def whole(here_us: float, here_date: str, there_date: str) -> Profile:
    """Return a profile of the first convolution: 16 rows by a library, 32 rows by a library and a kernel of mbc."""
    scaled_table = table(32)
    requests = {rows: scaled_table.request(first(scaled_table), Rows(0, rows)) for rows in (16, 32)}
    library = next(c for c in scaled_table.candidates(first(scaled_table), scaled_table.whole) if c.provider == "cudnn")
    kernel = next(
        c for c in own(scaled_table.candidates(first(scaled_table), scaled_table.whole)).values() if c.name == HALVES
    )
    return profile(
        {requests[16]: [measured(library, here_us)], requests[32]: [measured(library, 300.0), measured(kernel, 100.0)]},
        {requests[16]: Extent(1 << 30, date=here_date), requests[32]: Extent(1 << 30, date=there_date)},
    )


def test_a_later_kernel_competes_with_earlier_measurements():
    scaled_table = table(16, whole(1e6, EARLY, LATE))
    request = scaled_table.request(first(scaled_table), scaled_table.whole)
    candidate, *others = scaled_table.candidates(first(scaled_table), scaled_table.whole)
    assert candidate.name == HALVES and not candidate.measured and 50.0 <= candidate.time_us < 100.0
    assert others[0].measured
    assert scaled_table.other_sizes is not None
    kernel = Kernel(candidate.provider, candidate.name, candidate.settings, candidate.time_us, False)
    assert scaled_table.other_sizes.came_later(request, kernel)
    spread = calibration().spreads[scaled_group("mbc", 2)]
    assert scaled_table.other_sizes.spread(request, kernel) == spread
    _, high = calibration().factors(spread, H200)
    for here_us, dates in ((0.999 * high * candidate.time_us, (EARLY, LATE)), (1e6, (LATE, EARLY)), (1e6, ("", LATE))):
        before = table(16, whole(here_us, *dates))
        assert HALVES not in {c.name for c in before.candidates(first(before), before.whole)}
        assert before.other_sizes is not None and not before.other_sizes.came_later(request, kernel)


def later_there(here_us: float, here_date: str, there_date: str, kernel_is_outdated: bool = False) -> Profile:
    """Return this GPU's profile of the first convolution at 16 rows, and another GPU's with a kernel of mbc.

    `kernel_is_outdated`: the kernel was measured on this GPU before it was rewritten, and was as fast as the library.
    """
    scaled_table = table(16)
    request = scaled_table.request(first(scaled_table), scaled_table.whole)
    library = next(c for c in scaled_table.candidates(first(scaled_table), scaled_table.whole) if c.provider == "cudnn")
    kernel = next(
        c for c in own(scaled_table.candidates(first(scaled_table), scaled_table.whole)).values() if c.name == HALVES
    )
    there = profile({request: [measured(kernel, 100.0)]}, {request: Extent(1 << 30, date=there_date)})
    here = profile({request: [measured(library, here_us)]}, {request: Extent(1 << 30, date=here_date)})
    if kernel_is_outdated:
        rows, key = (measured(kernel, here_us),), signature(request)
        here = replace(
            here, extents={}, earlier={key: rows}, outdated={key: Outdated(rows, Extent(1 << 30, date=here_date))}
        )
    return replace(here, similar=scaled_to(there, H100, H200))


@pytest.mark.parametrize("kernel_is_outdated", [False, True])
def test_a_kernel_that_came_later_on_a_similar_gpu_competes(kernel_is_outdated: bool):
    scaled_table = table(16, later_there(1e6, EARLY, LATE, kernel_is_outdated))
    request = scaled_table.request(first(scaled_table), scaled_table.whole)
    candidate = scaled_table.candidates(first(scaled_table), scaled_table.whole)[0]
    assert candidate.name == HALVES and not candidate.measured and candidate.time_us < 110.0
    assert scaled_table.other_sizes is not None
    kernel = Kernel(candidate.provider, candidate.name, candidate.settings, candidate.time_us, False)
    assert scaled_table.other_sizes.came_later(request, kernel)
    similar = scaled_table.other_sizes.of_similar_gpu
    assert similar is not None and similar.profile.scaling is not None
    high = similar.profile.scaling.spread(scaled_table.graph.precision).high
    assert high > 1
    beside = 0.999 * high * candidate.time_us
    for here_us, dates in ((beside, (EARLY, LATE)), (1e6, (LATE, EARLY)), (1e6, (EARLY, EARLY)), (1e6, ("", LATE))):
        before = table(16, later_there(here_us, *dates, kernel_is_outdated))
        times = {c.time_us for c in before.candidates(first(before), before.whole) if c.name == HALVES}
        assert before.other_sizes is not None and candidate.time_us not in times
        assert not before.other_sizes.came_later(request, kernel)


def test_a_plan_is_measured_where_a_kernel_came_later_on_a_similar_gpu():
    scaled_table = table(16, later_there(1e6, EARLY, LATE))
    plan = search(scaled_table, Limits(1 << 40, without=frozenset(("concurrent_stream",))))
    assert scaled_table.request(first(scaled_table), scaled_table.whole) in outdated(plan, scaled_table.other_sizes)
    assert "scaled from" in plan.target.profile


def test_a_recomputing_kernel_is_recognised_as_later(monkeypatch: pytest.MonkeyPatch):
    """A later kernel may be one that gives the recomputed bits, although it is not the fastest."""
    monkeypatch.setattr(user_rules, "bitwise_equal_to", lambda name, other: other in (HALVES, "fp32_emulated_halo"))
    scaled_table = table(32)
    operation, offered = first(scaled_table), own(scaled_table.candidates(first(scaled_table), scaled_table.whole))
    kernel, slow = (next(c for c in offered.values() if c.name == name) for name in (HALVES, "fp32_emulated_halo"))
    library = next(c for c in scaled_table.candidates(operation, scaled_table.whole) if c.provider == "cudnn")
    requests = {rows: scaled_table.request(operation, Rows(0, rows)) for rows in (16, 32)}
    own_profile = profile(
        {requests[16]: [measured(library, 20.0), measured(slow, 1e6)], requests[32]: [measured(kernel, 100.0)]},
        {requests[16]: Extent(1 << 30, date=EARLY), requests[32]: Extent(1 << 30, date=LATE)},
    )
    plain = table(16, own_profile)
    assert HALVES not in {c.name for c in plain.candidates(operation, plain.whole)}
    bound = plain.with_recomputed({operation.name: frozenset({"some kernel"})})
    candidate = bound.candidates(operation, bound.whole)[0]
    assert candidate.name == HALVES and bound.other_sizes is not None
    launched = Kernel(candidate.provider, candidate.name, candidate.settings, candidate.time_us, False)
    assert bound.other_sizes.came_later(requests[16], launched)
    assert bound.other_sizes.spread(requests[16], launched) == calibration().spreads[scaled_group("mbc", 2)]


def test_requests_run_by_scaled_times_are_measured_again():
    scaled_table = table(16, whole(1e6, EARLY, LATE))
    plan = search(scaled_table, Limits(1 << 40, without=frozenset(("concurrent_stream",))))
    assert outdated(plan, scaled_table.other_sizes) == (scaled_table.request(first(scaled_table), scaled_table.whole),)
    before = table(16, whole(1e6, LATE, EARLY))
    plan = search(before, Limits(1 << 40, without=frozenset(("concurrent_stream",))))
    assert outdated(plan, before.other_sizes) == () == outdated(plan, None)


def test_refused_kernels_do_not_return_from_another_size():
    """Both a whole mini-batch and a part of it are checked."""
    for own_profile, scaled_table, rows in (
        (whole(1e6, EARLY, LATE), table(16), 16),
        (parts(1e6, EARLY, LATE), table(16), 4),
    ):
        request = scaled_table.request(first(scaled_table), Rows(0, rows))
        kernel = next(
            c for c in own(scaled_table.candidates(first(scaled_table), Rows(0, rows))).values() if c.name == HALVES
        )
        refused = replace(measured(kernel, 1.0), refused="the result is wrong")
        measurements = {
            **own_profile.measurements,
            signature(request): (*own_profile.measurements[signature(request)], refused),
        }
        for profile_, offered in ((own_profile, True), (replace(own_profile, measurements=measurements), False)):
            candidates = table(16, profile_).candidates_of_micro_batch(first(scaled_table), Rows(0, rows))
            assert (HALVES in {c.name for c in candidates}) == offered


def test_dates_of_one_day_say_nothing():
    day = EARLY.partition("T")[0]
    for dates in ((day, EARLY), (EARLY, day)):
        scaled_table = table(16, whole(1e6, *dates))
        assert HALVES not in {c.name for c in scaled_table.candidates(first(scaled_table), scaled_table.whole)}
