"""One rank's connection to the GPUs of the other ranks: a communicator, and waits that end when another rank fails.

Without these waits a rank would wait forever for a failed rank's part of a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from mbc.errors import MbcError
from mbc.runtime.communicator import Communicator, Nccl, load_nccl, poll
from mbc.runtime.library import RanksInterface
from mbc.runtime.membership import Membership

# Functions that generated code calls, in the order of RanksInterface.
_FUNCTIONS = (
    "AllReduce", "AlltoAll", "AllGather", "ReduceScatter", "Reduce", "Broadcast", "CommGetAsyncError",
    "GetErrorString", "GroupStart", "GroupEnd",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Connection:
    """A rank's communicator and its membership; a rank that fails aborts the communicators of all other ranks.

    The abort ends everything on a GPU that waits for the failed rank.
    """

    members: Membership
    communicator: Communicator
    nccl: Nccl

    @classmethod
    def open(cls, members: Membership, versions: Mapping[str, str], gpu: str, max_ctas: int | None) -> Self:
        """Return a connection on the current CUDA device. Collective: all ranks call it together.

        Args:
            members: The ranks that share a mini-batch.
            versions: Versions by name, which must be equal on all ranks.
            gpu: This rank's GPU, which must differ from the other ranks' GPUs.
            max_ctas: Most thread blocks of a collective, as in `Communicator`.

        Raises:
            MbcError: The errors of `load_nccl`, `Communicator`, `Membership.agree` and `Membership.differ`.
        """
        nccl = load_nccl()
        members.agree({**versions, "NCCL": str(nccl.version)})
        members.differ("GPU", gpu)
        identity = members.broadcast(nccl.unique_id() if members.rank == 0 else b"")
        communicator = Communicator(nccl, identity, members.rank, members.size, max_ctas)
        members.on_failure(communicator.abort)
        return cls(members, communicator, nccl)

    @property
    def interface(self) -> RanksInterface:
        """Addresses of NCCL's functions, the communicator and the rank, for generated code."""
        functions = (self.nccl.address(f"nccl{name}") for name in _FUNCTIONS)
        return RanksInterface(*functions, self.communicator.handle, self.members.rank, self.members.size)

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done()`, however slow the other ranks are.

        Raises:
            MbcError: The reason of the first rank that fails meanwhile.
        """
        poll(lambda: done() or self._check())

    def _check(self) -> bool:
        self.members.check()
        try:
            self.communicator.check()
        except MbcError:
            self.members.check()  # which aborts the communicator when a rank fails
            raise
        return False
