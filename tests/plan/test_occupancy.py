from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mbc.plan.model import Rows
from mbc.plan.occupancy import Occupancy, RowSet, Segment

rows = st.tuples(st.integers(0, 20), st.integers(1, 8)).map(lambda p: Rows(p[0], p[0] + p[1]))


@given(st.lists(rows))
def test_row_sets_are_sets(parts):
    members: set[int] = set()
    joined = united = RowSet()
    for part in parts:
        new = set(range(part.start, part.stop))
        more = joined.joined(part)
        assert (more is None) == bool(members & new)
        united = united.united(part)
        if more is not None:
            joined = more
            members |= new
        assert {i for a, b in joined.parts for i in range(a, b)} == members
        assert all(a < b for a, b in united.parts)
        assert all(p[1] < q[0] for p, q in zip(united.parts, united.parts[1:], strict=False))
    assert {i for a, b in united.parts for i in range(a, b)} == {i for p in parts for i in range(p.start, p.stop)}


def test_row_sets_as_text():
    assert str(RowSet()) == "none"
    assert str(RowSet().united(Rows(0, 3)).united(Rows(5, 6))) == "0..3, 5..6"


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 15), st.booleans())))
def test_occupancy_is_a_byte_array(accesses):
    occupancy = Occupancy()
    owners: list[int | None] = [None] * 64
    for number, (start, length, write) in enumerate(accesses):
        stop = start + length
        if write:
            occupancy.replace(Segment(start, stop, number, number, 0, None))
            owners[start:stop] = [number] * length
        writers: list[int | None] = [None] * length
        end = start
        for segment in occupancy.within(start, stop):
            assert end <= segment.start < segment.stop <= stop
            end = segment.stop
            writers[segment.start - start : segment.stop - start] = [segment.buffer] * (segment.stop - segment.start)
        assert writers == owners[start:stop]
