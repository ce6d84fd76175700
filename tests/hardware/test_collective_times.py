"""The model of collectives: between measured sizes and thread blocks, other numbers of ranks, and estimates."""

from __future__ import annotations

import itertools

import pytest

from mbc.hardware.collective_times import (
    CollectiveKind,
    CollectiveModel,
    CollectiveSlowdown,
    CollectiveTime,
    ConcurrentKernel,
    Link,
    bus_share,
)

REDUCE = CollectiveKind.ALL_REDUCE
MIB = 1 << 20


def line_us(size_bytes: int, max_ctas: int = 8) -> float:
    return 8.0 + size_bytes / (20e3 * max_ctas)


def times(kind: CollectiveKind = REDUCE, ranks: int = 2) -> list[CollectiveTime]:
    sizes = (4, 1024, MIB, 16 * MIB)
    return [
        CollectiveTime(kind, ranks, Link.NVLINK, ctas, size, line_us(size, ctas), 1.0)
        for ctas in (2, 8)
        for size in sizes
    ]


MODEL = CollectiveModel(Link.NVLINK, times())


def test_a_fit_returns_measured_shares():
    for t in times():
        cost = MODEL.cost(t.kind, t.size_bytes, 2, t.max_ctas)
        assert cost.time_us == pytest.approx(t.time_us) and cost.measured and not cost.projected
    assert MODEL.choices(2) == (2, 8)


def test_between_beneath_and_beyond_sizes():
    between = MODEL.time_us(REDUCE, 4 * MIB, 2, 8)
    # Halfway between 1 MiB and 16 MiB in logarithms: the geometric mean.
    assert between == pytest.approx((line_us(MIB) * line_us(16 * MIB)) ** 0.5)
    assert MODEL.time_us(REDUCE, 1, 2, 8) == pytest.approx(line_us(4))
    assert MODEL.time_us(REDUCE, 64 * MIB, 2, 8) == pytest.approx(4 * line_us(16 * MIB))


def test_between_numbers_of_thread_blocks():
    few, many = (MODEL.time_us(REDUCE, 16 * MIB, 2, ctas) for ctas in (2, 8))
    assert MODEL.time_us(REDUCE, 16 * MIB, 2, 4) == pytest.approx((few * many) ** 0.5)
    assert MODEL.time_us(REDUCE, 16 * MIB, 2, 1) == pytest.approx(few)
    assert MODEL.time_us(REDUCE, 16 * MIB, 2, 32) == pytest.approx(many)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", CollectiveKind)
@pytest.mark.parametrize("rows", [(), tuple(times()), tuple(times(CollectiveKind.ALL_GATHER))], ids=["no", "ar", "ag"])
def test_more_bytes_never_take_less(kind: CollectiveKind, ranks: int, rows: tuple[CollectiveTime, ...]):
    model = CollectiveModel(Link.NVLINK, rows)
    times_us = [
        model.time_us(kind, size, ranks, 4) for size in (0, 1, 4, 100, 1024, 5000, MIB, 3 * MIB, 16 * MIB, 1 << 30)
    ]
    assert all(a <= b for a, b in itertools.pairwise(times_us)) and times_us[0] > 0


def test_noise_does_not_make_more_bytes_cheaper():
    noisy = [
        CollectiveTime(REDUCE, 2, Link.NVLINK, 8, size, us, 1.0) for size, us in ((4, 9.0), (64, 7.0), (1024, 12.0))
    ]
    model = CollectiveModel(Link.NVLINK, noisy)
    assert model.time_us(REDUCE, 64, 2, 8) == pytest.approx(9.0)


@pytest.mark.parametrize("ranks", [4, 8])
def test_more_ranks_are_projected_by_the_ring(ranks: int):
    cost = MODEL.cost(REDUCE, 16 * MIB, ranks, 8)
    assert cost.projected and not cost.measured
    # The bytes a link carries, at the same bandwidth, and the latency a step.
    latency_us, moved_us = line_us(4), line_us(16 * MIB) - line_us(4)
    expected = latency_us * (2 * (ranks - 1)) / 2 + moved_us * 2 * (ranks - 1) / ranks
    assert cost.time_us == pytest.approx(expected)
    # What was measured on so many itself comes first.
    here = CollectiveTime(REDUCE, ranks, Link.NVLINK, 8, 16 * MIB, 77.0, 1.0)
    assert CollectiveModel(Link.NVLINK, [*times(), here]).cost(REDUCE, 16 * MIB, ranks, 8).time_us == 77.0


def test_one_rank_needs_none():
    assert MODEL.time_us(REDUCE, MIB, 1, 8) == 0.0


def test_estimates_are_marked():
    model = CollectiveModel(Link.NVLINK)
    for mib, bus_gb_s in ((4, 76), (16, 166), (64, 264), (256, 296)):
        cost = model.cost(REDUCE, mib * MIB, 2, 32)
        assert not cost.measured
        assert cost.time_us == pytest.approx(bus_share(REDUCE, 2) * mib * MIB / (bus_gb_s * 1e3), rel=0.08)
    assert model.cost(REDUCE, 102_000_000, 2, 32).time_us == pytest.approx(387, rel=0.08)
    assert model.choices(2) == (1, 2, 4, 8, 16, 32)
    slower = [CollectiveModel(link).time_us(REDUCE, 64 * MIB, 2, 8) for link in Link]
    assert slower == sorted(slower)
    # What was measured over another link says nothing, and on another machine little.
    assert not CollectiveModel(Link.PCIE, times()).cost(REDUCE, MIB, 2, 8).measured
    stale = CollectiveModel(Link.NVLINK, times(), stale=True).cost(REDUCE, MIB, 2, 8)
    assert not stale.measured and stale.time_us == pytest.approx(line_us(MIB))


def test_slowdowns():
    rows = [
        CollectiveSlowdown(ConcurrentKernel.GEMM, 2, Link.NVLINK, ctas, ratio, 1.5)
        for ctas, ratio in ((2, 1.02), (8, 1.2))
    ]
    model = CollectiveModel(Link.NVLINK, (), rows)
    assert model.slowdown(ConcurrentKernel.GEMM, 2, 8).kernel_ratio == pytest.approx(1.2)
    assert 1.02 < model.slowdown(ConcurrentKernel.GEMM, 4, 4).kernel_ratio < 1.2
    assert model.slowdown(ConcurrentKernel.GEMM, 2, 4).collective_ratio == pytest.approx(1.5)
    estimates = [model.slowdown(ConcurrentKernel.REDUCTION, 2, ctas).kernel_ratio for ctas in (1, 8, 32)]
    assert estimates == sorted(estimates) and estimates[0] > 1


@pytest.mark.parametrize("kind", CollectiveKind)
@pytest.mark.parametrize("inside", [MODEL, CollectiveModel(Link.PCIE), CollectiveModel(Link.NVLINK, stale=True)])
def test_ranks_of_several_machines(kind: CollectiveKind, inside: CollectiveModel) -> None:
    """No machine sends its bytes faster than its network, and neither more machines nor more bytes save time."""
    rates, sizes, machines, per_machine = (10, 25, 100, 400, 3200), (4, MIB, 100 * MIB), (1, 2, 3, 8), (1, 2, 8)
    for gpus, size_bytes, ctas in itertools.product(per_machine, sizes, (1, 8)):
        us = {
            (rate, count): inside.across_nodes(gpus, rate).time_us(kind, size_bytes, count * gpus, ctas)
            for rate in rates
            for count in machines
        }
        alone_us = inside.time_us(kind, size_bytes, gpus, ctas)
        assert all(us[rate, 1] == alone_us for rate in rates)
        for (rate, count), time_us in us.items():
            moved_us = bus_share(kind, count) * size_bytes / (rate / 8 * 1e3)
            assert time_us >= max(alone_us, moved_us)
            assert gpus == 1 or time_us >= inside.time_us(kind, size_bytes, count * gpus, ctas)
            assert all(time_us >= us[other, count] for other in rates if other >= rate)
            assert all(time_us <= us[rate, other] for other in machines if other >= count)
        partly_us = inside.across_nodes(gpus, 100).time_us(kind, size_bytes, 8 * gpus - gpus // 2, ctas)
        assert us[100, 3] <= partly_us <= us[100, 8]


def test_what_is_known_of_the_network() -> None:
    sockets = [CollectiveTime(REDUCE, 2, Link.SOCKET, 8, size, 50 + size / 1e3, 1.0) for size in (4, MIB)]
    measured = CollectiveModel(Link.NVLINK, [*times(), *sockets])
    assert MODEL.links_text == ""
    assert MODEL.across_nodes(8).links_text == "25Gb assumed between machines, 8 GPUs in each by nvlink"
    assert MODEL.across_nodes(1, 2.5).links_text == "2.5Gb between machines, 1 GPU in each"
    assert measured.across_nodes(2).links_text == "measured sockets between machines, 2 GPUs in each by nvlink"
    of_two = measured.across_nodes(1).cost(REDUCE, MIB, 2, 8)
    assert of_two.time_us == pytest.approx(50 + MIB / 1e3) and not of_two.measured and of_two.projected
    assert not MODEL.across_nodes(2, 100.0).cost(REDUCE, MIB, 4, 8).projected
    copies = CollectiveModel(Link.NVLINK, [*times(), CollectiveTime(REDUCE, 2, Link.NVLINK, 0, 4, 9.0, 9.0)])
    assert copies.choices(2) == (0, 2, 8) and copies.across_nodes(1).choices(2) == (2, 8)
