"""What a module needs of the ranks that share its mini-batches: one of them is this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.graph import Ranks, TrainingGraph
from mbc.ranks.member import joined

SEED_STEP = 0x9E3779B97F4A7C15  # between the seeds of ranks: 2^64 over the golden ratio


class Membership(Protocol):
    """This process as one of the ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def agree(self, facts: Mapping[str, str]) -> None:
        """Collective: an MbcError that names ranks and values where a fact is not the same on all ranks."""
        ...

    def differ(self, what: str, value: str) -> None:
        """Collective: an MbcError where two ranks have the same."""
        ...

    def broadcast(self, payload: bytes) -> bytes:
        """Collective: what rank 0 gives."""
        ...

    def gather(self, payload: bytes) -> tuple[bytes, ...]:
        """Collective: what each rank gives, in their order."""
        ...

    def sum_on_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """Collective: the sum of the arrays of all ranks, the same bits everywhere."""
        ...

    def gather_on_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """Collective: [ranks, ...], the arrays of all ranks in their order."""
        ...

    def check(self) -> None:
        """An MbcError with the reason where another rank has failed."""
        ...

    def on_failure(self, act: Callable[[], None]) -> None:
        """Call `act`, in another thread, when another rank fails: it ends what waits for that rank."""
        ...


def check_membership(graph: TrainingGraph, found: Membership | None) -> Membership | None:
    """`found`, else those that this process was started among, where the plan is for several ranks. MBC281 where there
    are none, or another number, and what `joined` raises."""
    ranks = graph.ranks
    if found is None and ranks is not None:
        found = joined()
    check_size(ranks, 1 if found is None else found.size)
    return None if ranks is None else found


def check_size(ranks: Ranks | None, size: int) -> None:
    """MBC281 where a plan is for other ranks than `size` processes."""
    wanted = 1 if ranks is None else ranks.size
    if wanted == size:
        return
    planned = "one GPU" if wanted == 1 else f"{wanted} GPUs that share each mini-batch"
    there = "this process is alone" if size == 1 else f"{size} processes were started"
    start = f"start {wanted} processes (mpirun, srun, torchrun, or mbc train --gpus {wanted})" if wanted > 1 else (
        "start one process"
    )  # fmt: skip
    raise MbcError("MBC281", f"the plan is for {planned}, and {there}", f"{start}, or compile with --gpus {size}")


def seed_of(seed: int, rank: int) -> int:
    """Of a rank's dropout: that of rank 0 is the user's, and all are different."""
    return (seed + rank * SEED_STEP) % (1 << 63)
