"""One rank's connection to the GPUs of the others: a communicator, and waits during which another rank may fail, whose
part of a collective then never comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from mbc.errors import MbcError
from mbc.runtime.library import RanksInterface
from mbc.runtime.membership import Membership
from mbc.runtime.nccl import Communicator, Nccl, load_nccl, poll

# What generated code calls, in the order of RanksInterface.
_FUNCTIONS = (
    "AllReduce", "AlltoAll", "AllGather", "ReduceScatter", "Reduce", "Broadcast", "CommGetAsyncError",
    "GetErrorString", "GroupStart", "GroupEnd",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Connection:
    """A rank that fails aborts the communicators of all others, so that what waits for it on a GPU ends."""

    members: Membership
    communicator: Communicator
    nccl: Nccl

    @classmethod
    def open(cls, members: Membership, versions: Mapping[str, str], gpu: str, max_ctas: int | None) -> Self:
        """Collective, on the CUDA device that is current. `versions` are the same on all ranks, `gpu` is another one on
        each; `max_ctas` as in `Communicator`.

        Raises what `load_nccl`, `Communicator`, `Membership.agree` and `Membership.differ` do.
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
        """For generated code."""
        functions = (self.nccl.address(f"nccl{name}") for name in _FUNCTIONS)
        return RanksInterface(*functions, self.communicator.handle, self.members.rank, self.members.size)

    def wait(self, done: Callable[[], bool]) -> None:
        """Until `done()`. Raises the reason of the first rank that fails meanwhile; slow ones are waited for."""
        poll(lambda: done() or self._check())

    def _check(self) -> bool:
        self.members.check()
        try:
            self.communicator.check()
        except MbcError:
            self.members.check()  # which aborts the communicator when a rank fails
            raise
        return False
