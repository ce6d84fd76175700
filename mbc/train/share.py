"""The rows of each mini-batch on which one rank trains, and checks that ranks which read data by themselves agree."""

from __future__ import annotations

import struct
import zlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.graph import Role, TrainingGraph
from mbc.train.inputs import Batch

_PART = struct.Struct("<?qI")


@dataclass(frozen=True, slots=True)
class Share:
    """The rows [first, stop) of each mini-batch, or step, of `batch` rows; they belong to rank `rank` of `ranks`."""

    batch: int
    first: int
    stop: int
    rank: int = 0
    ranks: int = 1

    @property
    def rows(self) -> int:
        """Number of rows of this rank."""
        return self.stop - self.first


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of one mini-batch.

    Attributes:
        arrays: The rank's own rows.
        rows: Number of rows that the rank was given: rows of all ranks, or only its own.
        whole: Whether these are as many as a step takes; the last mini-batch may be incomplete.
        mark: Number that is equal on all ranks that were given equal rows.
    """

    arrays: Batch
    rows: int
    whole: bool
    mark: int = 0


class Group(Protocol):
    """The part of `mbc.ranks.rank_group.Group` that a training needs."""

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def gather(self, payload: bytes) -> tuple[bytes, ...]:
        """Return the payloads of all ranks, in their order. Collective."""
        ...

    def broadcast(self, payload: bytes) -> bytes:
        """Return the payload of rank 0. Collective."""
        ...

    def writing(self) -> AbstractContextManager[None]:
        """Return a context in which the failure of another rank does not end this process."""
        ...


class HoldsStates(Protocol):
    """An object with states that can be replaced."""

    def state(self, name: str) -> NDArray[Any]:
        """Return a copy of a state."""
        ...

    def set_state(self, name: str, array: NDArray[Any]) -> None:
        """Replace a state."""
        ...


def whole_batch(batch: int) -> Share:
    """Return the share of the only rank: all rows."""
    return Share(batch, 0, batch)


def step_share_of(graph: TrainingGraph, rank: int) -> Share:
    """Return a rank's share of a step's rows: the rows of all its mini-batches, one after another."""
    share, count = share_of(graph, rank), graph.optimizer.accumulate
    return Share(share.batch * count, share.first * count, share.stop * count, share.rank, share.ranks)


def share_of(graph: TrainingGraph, rank: int) -> Share:
    """Return a rank's share of a mini-batch's rows."""
    if graph.ranks is None:
        return whole_batch(graph.batch)
    first = graph.ranks.first_row(rank)
    return Share(graph.ranks.batch, first, first + graph.ranks.rows[rank], rank, graph.ranks.size)


def mark_of(batch: Batch) -> int:
    """Return a checksum of a mini-batch's first and last row, which is cheap and depends on the order of the rows."""
    mark = 0
    for array in batch:
        for row in array[[0, -1]] if len(array) else ():
            mark = zlib.crc32(np.ascontiguousarray(row).tobytes(), mark)
    return mark


def agreed(part: Part | None, common: bool, group: Group, steps: int) -> tuple[bool, int]:
    """Return whether all ranks have a whole part, and the number of remaining rows if they do not. Collective.

    It is called if the number of rows is known only after reading them.

    Args:
        part: This rank's part; None if its data have ended.
        common: Whether each rank was given all rows of the mini-batch.
        group: The ranks.
        steps: Steps of the epoch that are done.

    Raises:
        MbcError: MBC282 if ranks with common rows are at different mini-batches, so that some would wait for the others
            for ever; MBC283 if they were given different rows.
    """
    mine = (False, 0, 0) if part is None else (part.whole, part.rows, part.mark)
    parts = [_PART.unpack(one) for one in group.gather(_PART.pack(*mine))]
    rows = [one[1] for one in parts]
    remedy = "yield the same rows on all ranks, or take `rank` and `ranks` and yield those of one rank alone"
    if common and len(set(rows)) > 1:
        counts = ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(rows))
        raise MbcError(
            "MBC282", f"the ranks' data differ in their number of rows: in mini-batch {steps + 1} {counts}", remedy
        )
    if common and len({one[2] for one in parts}) > 1:
        raise MbcError(
            "MBC283", f"the ranks' data differ: mini-batch {steps + 1} of the epoch differs between ranks",
            f"{remedy}; shuffle by the epoch alone",
        )  # fmt: skip
    return all(one[0] for one in parts), rows[0] if common else sum(rows)


def share_statistics(net: HoldsStates, graph: TrainingGraph, group: Group) -> None:
    """Copy rank 0's running statistics, which a checkpoint holds, to all ranks. Collective.

    Each rank's own statistics are those of its own rows. Afterwards all states are equal on all ranks.
    """
    names = [state.value for state in graph.states if graph.values[state.value].role is Role.STATISTIC]
    if not names:
        return
    arrays = [net.state(name) for name in names]
    payload = group.broadcast(b"".join(array.tobytes() for array in arrays))
    start = 0
    for name, array in zip(names, arrays, strict=True):
        net.set_state(name, np.frombuffer(payload, array.dtype, array.size, start).reshape(array.shape))
        start += array.nbytes
