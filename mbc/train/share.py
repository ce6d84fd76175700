"""Which rows of each mini-batch one rank trains on, and in what ranks that read data each for themselves must agree."""

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
    """The rows [first, stop) of each mini-batch, or step, of `batch` rows are those of rank `rank` of `ranks`."""

    batch: int
    first: int
    stop: int
    rank: int = 0
    ranks: int = 1

    @property
    def rows(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of one mini-batch: `arrays` are its own rows. `rows` counts those that it was given, of all ranks
    or of itself alone; the part is `whole` where they are as many as a step takes, as of the last one they may not be.
    `mark` is the same on all ranks that were given the same rows."""

    arrays: Batch
    rows: int
    whole: bool
    mark: int = 0


class Group(Protocol):
    """The ranks: `mbc.ranks.rank_group.Group`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, payload: bytes) -> tuple[bytes, ...]: ...

    def broadcast(self, payload: bytes) -> bytes: ...

    def writing(self) -> AbstractContextManager[None]: ...


class HoldsStates(Protocol):
    """What has states that can be replaced."""

    def state(self, name: str) -> NDArray[Any]: ...

    def set_state(self, name: str, array: NDArray[Any]) -> None: ...


def whole_batch(batch: int) -> Share:
    """Of the only rank."""
    return Share(batch, 0, batch)


def step_share_of(graph: TrainingGraph, rank: int) -> Share:
    """Of the rows of a step, which may be those of several mini-batches: each rank has all of its own in a row."""
    share, count = share_of(graph, rank), graph.optimizer.accumulate
    return Share(share.batch * count, share.first * count, share.stop * count, share.rank, share.ranks)


def share_of(graph: TrainingGraph, rank: int) -> Share:
    """Of the rows of a mini-batch."""
    if graph.ranks is None:
        return whole_batch(graph.batch)
    first = graph.ranks.first_row(rank)
    return Share(graph.ranks.batch, first, first + graph.ranks.rows[rank], rank, graph.ranks.size)


def mark_of(batch: Batch) -> int:
    """Of a mini-batch: a checksum of its first row and its last, which is cheap, and differs where order does."""
    mark = 0
    for array in batch:
        for row in array[[0, -1]] if len(array) else ():
            mark = zlib.crc32(np.ascontiguousarray(row).tobytes(), mark)
    return mark


def agreed(part: Part | None, common: bool, group: Group, steps: int) -> tuple[bool, int]:
    """Collective, where only reading tells how many rows there are: whether all ranks have a whole part, and how many
    rows there are where not. `common`: each rank was given all rows of the mini-batch. `steps` of the epoch are done.

    MBC282 where such ranks are not at the same mini-batch, so that some would wait for the others for ever; MBC283
    where they were given other rows.
    """
    mine = (False, 0, 0) if part is None else (part.whole, part.rows, part.mark)
    told = [_PART.unpack(one) for one in group.gather(_PART.pack(*mine))]
    rows = [one[1] for one in told]
    remedy = "yield the same rows on all ranks, or take `rank` and `ranks` and yield those of one rank alone"
    if common and len(set(rows)) > 1:
        counts = ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(rows))
        raise MbcError(
            "MBC282", f"the ranks' data differ in length: of the rows of mini-batch {steps + 1} {counts}", remedy
        )
    if common and len({one[2] for one in told}) > 1:
        raise MbcError(
            "MBC283", f"the ranks' data differ: mini-batch {steps + 1} of the epoch is not the same on all ranks",
            f"{remedy}; shuffle by the epoch alone",
        )  # fmt: skip
    return all(one[0] for one in told), rows[0] if common else sum(rows)


def share_statistics(net: HoldsStates, graph: TrainingGraph, group: Group) -> None:
    """Collective: the running statistics of rank 0, those that a checkpoint holds, become those of all ranks, whose own
    are of their own rows. All states are then the same everywhere."""
    names = [state.value for state in graph.states if graph.values[state.value].role is Role.STATISTIC]
    if not names:
        return
    arrays = [net.state(name) for name in names]
    told = group.broadcast(b"".join(array.tobytes() for array in arrays))
    start = 0
    for name, array in zip(names, arrays, strict=True):
        net.set_state(name, np.frombuffer(told, array.dtype, array.size, start).reshape(array.shape))
        start += array.nbytes
