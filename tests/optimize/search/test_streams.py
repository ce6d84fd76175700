"""Waits and predicted times of several streams, compared with plain definitions."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbc.analysis.roofline import flops_of
from mbc.hardware.spec import find_spec
from mbc.hardware.streams import STREAM_TO, Space, Stream
from mbc.hardware.transfers import Slowdown
from mbc.ir.types import DType, Layout
from mbc.optimize.schedule.contention import contention
from mbc.optimize.schedule.simulate import Contention, LinkContention, measured_share, simulate, timeline
from mbc.optimize.schedule.synchronise import synchronise
from mbc.plan.model import Access, Buffer, Copy, Kernel, Launch, Mode, Program, Rows
from tests.optimize.planned import table

WHOLE = Rows(0, 1)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, list[Buffer], list[int]]:
    buffers = [
        Buffer(f"v{i}", WHOLE, Layout.CHANNELS_FIRST, DType.UINT8, 256 * draw(st.integers(1, 3)))
        for i in range(draw(st.integers(1, 5)))
    ]
    offsets = [256 * draw(st.integers(0, 6)) for _ in buffers]
    launches = []
    for _ in range(draw(st.integers(1, 12))):
        chosen = draw(st.lists(st.integers(0, len(buffers) - 1), min_size=1, max_size=3, unique=True))
        accesses = tuple(Access(b, WHOLE, draw(st.sampled_from([Mode.READ, Mode.WRITE]))) for b in chosen)
        work = Kernel("mbc", "k", (), draw(st.integers(1, 9)), measured=draw(st.booleans()))
        launches.append(Launch(work, (), draw(st.sampled_from(list(Stream))), accesses))
    return Program(tuple(launches), (), (), ()), buffers, offsets


def conflicts(program: Program, buffers: list[Buffer], offsets: list[int]) -> set[tuple[int, int]]:
    """Return the pairs of launches on different streams that touch a common byte, which at least one of them writes."""
    pairs = set()
    for j, later in enumerate(program.launches):
        for i, earlier in enumerate(program.launches[:j]):
            if earlier.stream is later.stream:
                continue
            for a in earlier.accesses:
                for b in later.accesses:
                    low = max(offsets[a.buffer], offsets[b.buffer])
                    high = min(
                        offsets[a.buffer] + buffers[a.buffer].size_bytes,
                        offsets[b.buffer] + buffers[b.buffer].size_bytes,
                    )
                    if low < high and (a.mode is not Mode.READ or b.mode is not Mode.READ):
                        pairs.add((i, j))
    return pairs


def order(program: Program, waits: tuple[tuple[int, int], ...]) -> list[set[int]]:
    """Return for each launch the launches that have ended before it starts."""
    before: list[set[int]] = []
    for j, later in enumerate(program.launches):
        direct = {i for i, launch in enumerate(program.launches[:j]) if launch.stream is later.stream}
        direct |= {i for i, k in waits if k == j}
        before.append(direct.union(*(before[i] for i in direct)))
    return before


@given(programs())
@settings(max_examples=300)
def test_waits_order_every_conflict_and_none_is_implied(case: tuple[Program, list[Buffer], list[int]]) -> None:
    program, buffers, offsets = case
    waits = synchronise(program, buffers, offsets)
    before = order(program, waits)
    needed = conflicts(program, buffers, offsets)
    assert all(i in before[j] for i, j in needed)
    for wait in waits:
        without = order(program, tuple(w for w in waits if w != wait))
        assert any(i not in without[j] for i, j in needed), f"{wait} is implied by the others"


@given(programs())
def test_time_is_between_the_busiest_stream_and_the_sum(case: tuple[Program, list[Buffer], list[int]]) -> None:
    program, buffers, offsets = case
    timed = Program(program.launches, synchronise(program, buffers, offsets), (), ())
    busy = [sum(x.work.time_us for x in program.launches if x.stream is s) for s in Stream]
    assert max(busy) <= simulate(timed) <= sum(busy)
    assert 0 <= measured_share(timed) <= 1


def launch(stream: Stream, time_us: float) -> Launch:
    return Launch(Kernel("mbc", "k", (), time_us, measured=True), (), stream, ())


def test_measured_copies_measure_no_kernel() -> None:
    copy = Launch(Copy(9.0, measured=True), (), Stream.TO_HOST, ())
    estimated = Launch(Kernel("mbc", "k", (), 3.0, measured=False), (), Stream.COMPUTE, ())
    program = Program((launch(Stream.COMPUTE, 1.0), estimated, copy), (), (), ())
    assert measured_share(program) == 0.25


def test_a_wait_delays_the_later_launch() -> None:
    launches = (launch(Stream.COMPUTE, 5), launch(Stream.TO_HOST, 7), launch(Stream.COMPUTE, 1))
    assert simulate(Program(launches, (), (), ())) == 7
    assert simulate(Program(launches, ((1, 2),), (), ())) == 8


def test_stalls_are_where_a_stream_stood_still() -> None:
    launches = (launch(Stream.COMPUTE, 5), launch(Stream.TO_HOST, 7), launch(Stream.COMPUTE, 1))
    times = timeline(Program(launches, ((0, 1), (1, 2)), (), ()))
    assert times.starts_us == (0, 5, 12)
    assert times.ends_us == (5, 12, 13)
    assert times.stalls_us == (0, 5, 7)


ALONE = Slowdown()
SLOW = Slowdown(1.25, 1.5, 2.0)
NOTHING = Contention({space: LinkContention((ALONE,) * 12, 1.0, 1.0) for space in STREAM_TO}, (0.0,) * 12)


def slow(count: int) -> dict[Space, LinkContention]:
    return {space: LinkContention((SLOW,) * count, 1.3, 1.1) for space in STREAM_TO}


@given(programs())
@settings(max_examples=200)
def test_without_slowdowns_launches_run_when_streams_and_waits_say(
    case: tuple[Program, list[Buffer], list[int]],
) -> None:
    program, buffers, offsets = case
    timed = replace(program, waits=synchronise(program, buffers, offsets))
    alone, together = timeline(timed), timeline(timed, None, NOTHING)
    for a, b in (
        (alone.starts_us, together.starts_us), (alone.ends_us, together.ends_us), (alone.stalls_us, together.stalls_us)
    ):  # fmt: skip
        assert b == pytest.approx(a)


@given(programs())
@settings(max_examples=200)
def test_slowdowns_only_delay_and_by_no_more_than_they_say(case: tuple[Program, list[Buffer], list[int]]) -> None:
    program, buffers, offsets = case
    timed = replace(program, waits=synchronise(program, buffers, offsets))
    slowed = simulate(timed, None, Contention(slow(12), (0.0,) * 12))
    assert simulate(timed) - 1e-6 <= slowed <= 2 * sum(x.work.time_us for x in program.launches) + 1e-6


@pytest.mark.parametrize(
    ("streams", "ends"),
    [
        # A kernel of 12 us beside a copy of 5 to the host: 4 of it are done when the copy ends.
        ((Stream.TO_HOST,), (13.0, 5.0)),
        ((Stream.TO_DEVICE,), (12 + 5 / 3, 5.0)),
        # Both ways: the copies take 6.5 and 5.5; 2.75 of the kernel are done after 5.5, 0.8 more after 6.3.
        ((Stream.TO_HOST, Stream.TO_DEVICE), None),
    ],
)
def test_concurrent_work_slows_down(streams: tuple[Stream, ...], ends: tuple[float, ...] | None) -> None:
    launches = (launch(Stream.COMPUTE, 12), *(launch(stream, 5) for stream in streams))
    times = timeline(Program(launches, (), (), ()), None, Contention(slow(3), (1.0,) * 3))
    if ends is None:
        device_end = 5 * 1.1
        host_end = device_end + (5 - device_end / 1.3)
        done = device_end / SLOW.both + (host_end - device_end) / SLOW.out
        ends = (host_end + 12 - done, host_end, device_end)
    assert times.ends_us == pytest.approx(ends)


@pytest.mark.parametrize(("fills", "ends"), [((0.3, 0.6), (12, 5)), ((0.5, 1.0), (14.5, 7.5)), ((1.0, 1.0), (17, 10))])
def test_concurrent_kernels_share_the_gpu(fills: tuple[float, ...], ends: tuple[float, ...]) -> None:
    launches = (launch(Stream.COMPUTE, 12), launch(Stream.CONCURRENT, 5))
    times = timeline(Program(launches, (), (), ()), None, Contention({}, fills))
    assert times.ends_us == pytest.approx(ends)


def test_kernels_at_an_end_of_a_wait_take_longer() -> None:
    streams = (Stream.COMPUTE, Stream.TO_HOST, Stream.COMPUTE, Stream.COMPUTE, Stream.CONCURRENT)
    launches = tuple(launch(stream, 10) for stream in streams)
    waiting = replace(NOTHING, fills=(0.0,) * 5, wait_us=2.0, copy_wait_us=3.0)
    times = timeline(Program(launches, ((0, 1), (1, 3), (2, 4)), (), ()), None, waiting)
    # The first is waited for by the copy and the fourth waits for it; the last waits for the third.
    assert times.ends_us == (13, 23, 23, 36, 35)


def test_contention_tells_kernels_by_their_time_and_bytes() -> None:
    spec = find_spec("h200")
    small, large = (Buffer("x", WHOLE, Layout.CHANNELS_FIRST, DType.UINT8, size) for size in (1 << 20, 1 << 30))
    large_us = (1 << 30) / spec.copy_gb_s / 1e3

    def kernel(buffer: int, time_us: float) -> Launch:
        accesses = (Access(buffer, WHOLE, Mode.READ),)
        return Launch(Kernel("mbc", "k", (), time_us, measured=True), (), Stream.COMPUTE, accesses)

    copies = Launch(Copy(9.0, False), (), Stream.TO_HOST, (Access(0, WHOLE, Mode.READ),))
    launches = (kernel(1, 1.1 * large_us), kernel(0, spec.launch_us), kernel(1, 5 * large_us), kernel(0, 100.0), copies)
    graph = table("residual").graph
    slowdowns = contention(Program(launches, (), (), ()), graph, [small, large], spec)
    link = spec.host_link
    assert slowdowns is not None
    assert slowdowns.links.keys() == {Space.HOST}
    host = slowdowns.links[Space.HOST]
    assert host.slowdowns == (link.streaming, link.cached, link.computing, link.computing, ALONE)
    assert host.out == link.to_host_gb_s / link.to_host_both_gb_s > 1
    # What each fills matters only with a concurrent stream.
    assert slowdowns.fills == (0,) * 5
    aside = (*launches, replace(launches[3], stream=Stream.CONCURRENT))
    together = contention(Program(aside, (), (), ()), graph, [small, large], spec)
    assert together is not None
    assert together.fills[0] == 1 and together.fills[5] < 0.01 and together.fills[4] == 0
    assert contention(Program(launches[:4], (), (), ()), graph, [small, large], spec) is None


def test_fp32_products_fill_the_gpu() -> None:
    """A kernel that reaches the rate of fp32 units fills the GPU, although tensor cores would be faster in fp16."""
    spec, graph = replace(find_spec("h200"), fp32_tflops=0.06, fp16_tflops=0.79), table("residual").graph
    operation = next(op for op in graph.train if op.kind == "convolution")
    for rate, fills in ((spec.fp32_tflops, 1.0), (0.3 * spec.fp32_tflops, 0.5)):
        idle = Launch(Kernel("cudnn", "k", (), 0.0, measured=True), (operation.name,), Stream.CONCURRENT, ())
        time_us = flops_of(idle, operation, graph, []) / (rate * 1e6) + spec.launch_us
        launch = replace(idle, work=replace(idle.work, time_us=time_us))
        slowdowns = contention(Program((launch,), (), (), ()), graph, [], spec)
        assert slowdowns is not None and slowdowns.fills[0] == pytest.approx(fills)
