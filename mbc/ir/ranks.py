"""How a mini-batch is shared by ranks."""

from __future__ import annotations

from mbc.errors import MbcError
from mbc.ir.graph import Ranks


def share_rows(batch: int, size: int) -> tuple[Ranks, ...]:
    """The rows of each of `size` ranks, as even as can be, the first ranks having one more: a `Ranks` for each number
    of rows. MBC280 where a rank would have none."""
    least, more = divmod(batch, size)
    if least == 0:
        raise MbcError(
            "MBC280",
            f"a mini-batch of {batch} cannot be shared by {size} GPUs: each needs one row or more",
            "raise batch, which counts the rows of all GPUs together, or take fewer GPUs",
        )
    rows = (least + 1,) * more + (least,) * (size - more)
    groups = (tuple(rank for rank in range(size) if rows[rank] == count) for count in dict.fromkeys(rows))
    return tuple(Ranks(rows, members) for members in groups)
