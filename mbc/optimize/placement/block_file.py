"""Files of blocks in the format of minimalloc: comma-separated values, one block in each line.

The columns are `id`, `lower` and `upper` (the block is live from `lower` to before `upper`), `size` and, if wanted,
`alignment` (the block's offset is a multiple of it). https://github.com/google/minimalloc describes the format.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mbc import files
from mbc.errors import MbcError
from mbc.optimize.placement.place_blocks import place, place_lowest
from mbc.optimize.schedule.liveness import Block, peak_bytes
from mbc.plan.file import MOST_BYTES

_NUMBERS = ("lower", "upper", "size")
_ALIGNMENT = "alignment"
_MOST = 2**62  # of a number, and of all sizes together: heights are 64-bit integers


@dataclass(frozen=True, slots=True)
class NamedBlocks:
    """The blocks of a file.

    Attributes:
        names: The `id` of each block.
        blocks: The blocks, with the sizes of the file.
        alignment: Bytes of which every offset is a multiple: the least common multiple of the file's alignments.
    """

    names: tuple[str, ...]
    blocks: tuple[Block, ...]
    alignment: int = 1


def read_blocks(path: Path) -> NamedBlocks:
    """Return the blocks of a file; raise MBC322 if it cannot be read or is not in the format."""
    try:
        rows = csv.DictReader(io.StringIO(files.read_text(path, MOST_BYTES)), strict=True, skipinitialspace=True)
        columns = tuple(rows.fieldnames or ())
        wanted = ("id", *_NUMBERS)
        if sorted(set(columns) - {_ALIGNMENT}) != sorted(wanted) or len(set(columns)) < len(columns):
            raise _unusable(path, f"its first line is not {','.join(wanted)} with or without {_ALIGNMENT}")
        blocks: dict[str, Block] = {}
        alignment = 1
        for row in rows:
            where = f"line {rows.line_num}"
            if None in row or None in row.values():
                raise _unusable(path, f"{where} has another number of values than the first line")
            if row["id"] in blocks:
                raise _unusable(path, f"{where} repeats the id '{row['id']}'")
            lower, upper, size = (_number(path, where, row, column) for column in _NUMBERS)
            if upper <= lower:
                raise _unusable(path, f"in {where} upper ({upper}) is not above lower ({lower})")
            blocks[row["id"]] = Block((len(blocks),), size, lower, upper)
            alignment = math.lcm(alignment, _number(path, where, row, _ALIGNMENT) if _ALIGNMENT in row else 1)
    except UnicodeDecodeError as error:
        raise _unusable(path, f"it is not UTF-8 text (byte {error.start})") from None
    except csv.Error as error:
        raise _unusable(path, str(error)) from None
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None
    if sum(block.size_bytes + alignment for block in blocks.values()) >= _MOST:
        raise _unusable(path, "its sizes and alignments together reach 2^62")
    return NamedBlocks(tuple(blocks), tuple(blocks.values()), alignment)


def place_named(named: NamedBlocks, capacity: int | None = None) -> tuple[list[int], int]:
    """Return an offset for each block, and the height that they reach.

    Args:
        named: The blocks.
        capacity: A height that is low enough; None: the lowest height that the search finds.

    Raises:
        MbcError: MBC323, the blocks that are live at once exceed the capacity; MBC343, the search found no placement.
    """
    peak = peak_bytes(named.blocks)[0] if named.blocks else 0
    if capacity is not None and peak > capacity:
        raise MbcError(
            "MBC323", f"blocks of {peak} are live at once, and the capacity is {capacity}",
            f"give --capacity {peak} or more",
        )  # fmt: skip
    unit = named.alignment
    blocks = [replace(block, size_bytes=-(-block.size_bytes // unit) * unit) for block in named.blocks]
    offsets, _ = place_lowest(blocks) if capacity is None else place(blocks, capacity)
    height = max((offset + block.size_bytes for offset, block in zip(offsets, named.blocks, strict=True)), default=0)
    if capacity is not None and height > capacity:
        raise MbcError(
            "MBC343", f"no placement within the capacity of {capacity} was found; the lowest reaches {height}",
            f"give --capacity {height}, or leave it out for a longer search",
        )  # fmt: skip
    return offsets, height


def placed_text(named: NamedBlocks, offsets: Sequence[int]) -> str:
    """Return the text of a file of blocks with their offsets."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("id", *_NUMBERS, "offset"))
    for name, block, offset in zip(named.names, named.blocks, offsets, strict=True):
        writer.writerow((name, block.start, block.stop, block.size_bytes, offset))
    return text.getvalue()


def _number(path: Path, where: str, row: Mapping[str, str], column: str) -> int:
    """Return a number of a row; raise MBC322 unless it is whole and in range."""
    least = 0 if column in ("lower", "upper") else 1
    text = row[column].strip()
    if not re.fullmatch(r"\d{1,19}", text, re.ASCII) or not least <= int(text) < _MOST:
        raise _unusable(path, f"{column} in {where} is '{text}', not a whole number of at least {least} below 2^62")
    return int(text)


def _unusable(path: Path, reason: str) -> MbcError:
    return MbcError("MBC322", f"'{path}' is no file of blocks: {reason}", "give a file as docs/memory.md describes")
