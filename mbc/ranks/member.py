"""This process as a rank, for the modules that it opens: its group, and MPI for modules on the CPU."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.ranks.environment import read_environment
from mbc.ranks.mpi import MpiCollectives
from mbc.ranks.rank_group import Group


class Member:
    """One rank of a group. Collective methods must be called by all ranks, in the same order."""

    def __init__(self, group: Group) -> None:
        """Register for failures of the group."""
        self.group = group
        self._acts: list[Callable[[], None]] = []
        group.call_on_failure(self._failed)

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size

    def agree(self, facts: Mapping[str, str]) -> None:
        """Raise MBC263 if a fact differs between ranks. Collective."""
        self.group.agree(facts)

    def differ(self, what: str, value: str) -> None:
        """Raise MBC266 if two ranks have equal values. Collective."""
        self.group.differ(what, value)

    def broadcast(self, payload: bytes) -> bytes:
        """Return the bytes that rank 0 passes. Collective."""
        return self.group.broadcast(payload)

    def gather(self, payload: bytes) -> tuple[bytes, ...]:
        """Return the bytes that each rank passes, in the order of ranks. Collective."""
        return self.group.gather(payload)

    def sum_on_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the sum of the arrays of all ranks, with equal bits on every rank; MBC265 without MPI. Collective."""
        total = np.array(array, order="C", copy=True)
        self._mpi.add(total)
        return total

    def gather_on_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the arrays of all ranks in their order, as one array [ranks, ...]; MBC265 without MPI. Collective."""
        return self._mpi.gather(array)

    def check_mpi(self) -> None:
        """Raise MBC265 if the MPI that sums on CPUs need is missing."""
        _ = self._mpi

    def check(self) -> None:
        """Raise MBC264 if another rank has failed."""
        self.group.check()

    def on_failure(self, act: Callable[[], None]) -> None:
        """Call `act` in another thread when a rank fails, or at once if a rank has failed already."""
        self._acts.append(act)
        if self.group.failure is not None:
            act()

    @cached_property
    def _mpi(self) -> MpiCollectives:
        return MpiCollectives(self.group.environment, self.group.check)

    def close(self) -> None:
        """Wait until all ranks have called this method, then leave the group. Collective."""
        self.group.close()

    def _failed(self) -> None:
        for act in tuple(self._acts):
            act()


@cache
def joined() -> Member | None:
    """Return this process as one of the ranks with which it was started, or None if it is alone.

    The ranks meet at the first call. This process leaves them when Python ends; if an exception ends it, they are
    informed.

    Raises:
        MbcError: The errors of `Group.open`.
    """
    environment = read_environment(os.environ)
    if environment is None:
        return None
    member = Member(Group.open(environment))
    _leave_at_end(member)
    return member


def _leave_at_end(member: Member) -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        member.group.fail(f"{kind.__name__}: {error}")
        before(kind, error, trace)

    def leave() -> None:
        if member.group.failure is None:
            member.close()

    sys.excepthook = hook
    atexit.register(leave)
