"""The interface between a module and the ranks that share its mini-batches; this process is one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.graph import Ranks, TrainingGraph
from mbc.ranks.member import joined

SEED_STEP = 0x9E3779B97F4A7C15  # difference of the seeds of two ranks: 2^64 over the golden ratio


class Membership(Protocol):
    """This process as one of the ranks. Collective methods must be called by all ranks, in the same order."""

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def agree(self, facts: Mapping[str, str]) -> None:
        """Raise an MbcError that names ranks and values if a fact differs between ranks. Collective."""
        ...

    def differ(self, what: str, value: str) -> None:
        """Raise an MbcError if two ranks have equal values. Collective."""
        ...

    def broadcast(self, payload: bytes) -> bytes:
        """Return the bytes that rank 0 passes. Collective."""
        ...

    def gather(self, payload: bytes) -> tuple[bytes, ...]:
        """Return the bytes that each rank passes, in the order of ranks. Collective."""
        ...

    def sum_on_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the sum of the arrays of all ranks, with equal bits on every rank. Collective."""
        ...

    def gather_on_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the arrays of all ranks in their order, as one array [ranks, ...]. Collective."""
        ...

    def check(self) -> None:
        """Raise an MbcError with the reason if another rank has failed."""
        ...

    def on_failure(self, act: Callable[[], None]) -> None:
        """Call `act` in another thread when another rank fails, to end everything that waits for that rank."""
        ...


def check_membership(graph: TrainingGraph, members: Membership | None) -> Membership | None:
    """Return the ranks that share the mini-batch; None if the plan is for one process.

    Args:
        graph: The plan's graph, which says how many ranks it is for.
        members: The ranks; None for those with which this process was started.

    Raises:
        MbcError: MBC281 if the number of ranks differs from the plan's, and the errors of `joined`.
    """
    ranks = graph.ranks
    if members is None and ranks is not None:
        members = joined()
    check_size(ranks, 1 if members is None else members.size)
    return None if ranks is None else members


def check_size(ranks: Ranks | None, size: int) -> None:
    """Raise an error unless a plan is for `size` processes.

    Raises:
        MbcError: MBC281 if it is for another number.
    """
    wanted = 1 if ranks is None else ranks.size
    if wanted == size:
        return
    planned = "one GPU" if wanted == 1 else f"{wanted} GPUs that share each mini-batch"
    there = "only this process was started" if size == 1 else f"{size} processes were started"
    start = f"start {wanted} processes (mpirun, srun, torchrun, or mbc train --gpus {wanted})" if wanted > 1 else (
        "start one process"
    )  # fmt: skip
    raise MbcError("MBC281", f"the plan is for {planned}, but {there}", f"{start}, or compile with --gpus {size}")


def seed_of(seed: int, rank: int) -> int:
    """Return the seed of a rank's dropout: the user's seed for rank 0, a different one for each other rank."""
    return (seed + rank * SEED_STEP) % (1 << 63)
