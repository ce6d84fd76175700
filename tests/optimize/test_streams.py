"""Waits and predicted time over several streams, against plain definitions."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mbc.ir.types import DType, Layout
from mbc.optimize.simulate import measured_share, simulate
from mbc.optimize.synchronise import synchronise
from mbc.plan.model import Access, Buffer, Kernel, Launch, Mode, Program, Rows, Stream

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
    """Pairs of launches on different streams that touch a byte in common, at least one of them writing."""
    found = set()
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
                        found.add((i, j))
    return found


def order(program: Program, waits: tuple[tuple[int, int], ...]) -> list[set[int]]:
    """For each launch, those that are finished before it starts."""
    before: list[set[int]] = []
    for j, later in enumerate(program.launches):
        direct = {i for i, launch in enumerate(program.launches[:j]) if launch.stream is later.stream}
        direct |= {i for i, k in waits if k == j}
        before.append(direct.union(*(before[i] for i in direct)))
    return before


@given(programs())
@settings(max_examples=300, deadline=None)
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


def test_a_wait_delays_the_later_launch() -> None:
    def launch(stream: Stream, time_us: float) -> Launch:
        return Launch(Kernel("mbc", "k", (), time_us, measured=True), (), stream, ())

    launches = (launch(Stream.COMPUTE, 5), launch(Stream.TO_HOST, 7), launch(Stream.COMPUTE, 1))
    assert simulate(Program(launches, (), (), ())) == 7
    assert simulate(Program(launches, ((1, 2),), (), ())) == 8
