"""`mbc place`: files of blocks in minimalloc's format, the lowest placement, capacities, and files that are refused."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from mbc.optimize.schedule.liveness import Block
from tests.optimize.placement.drawn_blocks import jigsaw, overlaps

HEADER = "id,lower,upper,size"
FIVE = f"{HEADER}\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"


def placed(text: str) -> tuple[list[Block], list[int]]:
    rows = list(csv.DictReader(text.splitlines()))
    blocks = [Block((i,), int(row["size"]), int(row["lower"]), int(row["upper"])) for i, row in enumerate(rows)]
    return blocks, [int(row["offset"]) for row in rows]


def test_blocks_are_printed_or_written_with_offsets(mbc):
    Path("five.csv").write_text(FIVE)
    done = mbc("place", "five.csv")
    assert (done.code, done.err) == (0, "5 blocks reach 12, equal to the most that is live at once\n")
    assert [line.rpartition(",")[0] for line in done.out.splitlines()] == FIVE.splitlines()
    assert not overlaps(*placed(done.out))
    written = mbc("place", "five.csv", "-o", "placed.csv")
    assert written.code == 0 and written.out.startswith("placed.csv: 5 blocks reach 12,")
    assert Path("placed.csv").read_text() == done.out
    assert "MBC370" in mbc("place", "five.csv", "-o", "five.csv").err


def test_the_lowest_placement_needs_no_capacity(mbc):
    rows = [f"{i},{block.start},{block.stop},{block.size_bytes}" for i, block in enumerate(jigsaw(400))]
    Path("pieces.csv").write_text("\n".join((HEADER, *rows)))
    lowest = mbc("place", "pieces.csv")
    assert "equal to the most that is live at once" in lowest.err and not overlaps(*placed(lowest.out))
    wide = mbc("place", "pieces.csv", "--capacity", str(2 * 2000 * 256))
    assert wide.code == 0 and "above the most that is live at once" in wide.err


def test_offsets_are_aligned(mbc):
    Path("aligned.csv").write_text("size,id,lower,upper,alignment\n5,a,0,2,4\n3,b,0,2,6\n7,c,1,3,1\n")
    done = mbc("place", "aligned.csv")
    blocks, offsets = placed(done.out)
    assert sorted(offsets) == [0, 12, 24] and not overlaps(blocks, offsets)


def test_a_capacity_below_the_live_blocks_or_any_placement_is_refused(mbc):
    Path("five.csv").write_text(FIVE)
    done = mbc("place", "five.csv", "--capacity", "11")
    assert done.code == 1
    assert "error MBC323: blocks of 12 are live at once, and the capacity is 11\nhelp: give --capacity 12" in done.err
    Path("aligned.csv").write_text(f"{HEADER},alignment\na,0,2,3,4\nb,0,2,3,4\n")
    done = mbc("place", "aligned.csv", "--capacity", "6")
    assert done.code == 1 and "error MBC343: no placement within the capacity of 6 was found" in done.err
    assert mbc("place", "aligned.csv", "--capacity", "7").code == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "its first line is not id,lower,upper,size with or without alignment"),
        ("id,lower,upper,size,gaps\na,0,1,1,\n", "its first line is not id,lower,upper,size"),
        (f"{HEADER}\na,0,1\n", "line 2 has another number of values than the first line"),
        (f"{HEADER}\na,0,1,-4\n", "size in line 2 is '-4', not a whole number of at least 1"),
        (f"{HEADER}\na,x,1,4\n", "lower in line 2 is 'x', not a whole number of at least 0"),
        (f"{HEADER}\na,0,1,4\nb,3,3,4\n", "in line 3 upper (3) is not above lower (3)"),
        (f"{HEADER}\na,0,1,4\na,1,2,4\n", "line 3 repeats the id 'a'"),
        (f"{HEADER},alignment\na,0,1,4,0\n", "alignment in line 2 is '0'"),
        (f"{HEADER}\n" + "".join(f"{i},0,1,{2**61}\n" for i in range(2)), "together reach 2^62"),
        (f'{HEADER}\n"a,0,1,4\n', "unexpected end of data"),
    ],
)  # fmt: skip
def test_other_files_are_refused(mbc, text, reason):
    Path("blocks.csv").write_text(text)
    done = mbc("place", "blocks.csv")
    assert done.code == 1 and done.out == ""
    assert "error MBC322: 'blocks.csv' is no file of blocks: " in done.err and reason in done.err


def test_files_that_cannot_be_read_are_refused(mbc):
    assert "MBC322: 'none.csv' is no file of blocks: No such file" in mbc("place", "none.csv").err
    Path("bytes.csv").write_bytes(b"id\xff")
    assert "it is not UTF-8 text (byte 2)" in mbc("place", "bytes.csv").err
    Path("empty.csv").write_text(f"{HEADER}\n")
    assert mbc("place", "empty.csv").out == f"{HEADER},offset\n"
