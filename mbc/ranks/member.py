"""This process as a rank, for the modules that it opens: the group that it has met, and MPI where NumPy computes."""

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
    """One rank of a group."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._acts: list[Callable[[], None]] = []
        group.call_on_failure(self._failed)

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def agree(self, facts: Mapping[str, str]) -> None:
        """Collective: MBC263 where a fact is not the same on all ranks."""
        self.group.agree(facts)

    def differ(self, what: str, value: str) -> None:
        """Collective: MBC266 where two ranks have the same."""
        self.group.differ(what, value)

    def broadcast(self, payload: bytes) -> bytes:
        """Collective: what rank 0 gives."""
        return self.group.broadcast(payload)

    def gather(self, payload: bytes) -> tuple[bytes, ...]:
        """Collective: what each rank gives, in their order."""
        return self.group.gather(payload)

    def sum_on_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """Collective: the sum of the arrays of all ranks, the same bits everywhere. MBC265 without MPI."""
        total = np.array(array, order="C", copy=True)
        self._mpi.add(total)
        return total

    def gather_on_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """Collective: [ranks, ...], the arrays of all ranks in their order. MBC265 without MPI."""
        return self._mpi.gather(array)

    def check_mpi(self) -> None:
        """MBC265 without the MPI that sums on CPUs need."""
        _ = self._mpi

    def check(self) -> None:
        """MBC264 where another rank has failed."""
        self.group.check()

    def on_failure(self, act: Callable[[], None]) -> None:
        """Call `act`, in another thread, when a rank fails."""
        self._acts.append(act)
        if self.group.failure is not None:
            act()

    @cached_property
    def _mpi(self) -> MpiCollectives:
        return MpiCollectives(self.group.environment, self.group.check)

    def close(self) -> None:
        """Collective: the orderly end."""
        self.group.close()

    def _failed(self) -> None:
        for act in tuple(self._acts):
            act()


@cache
def joined() -> Member | None:
    """The ranks that this process was started among, met at the first call; None where it is alone. They are left when
    Python ends, and told of an exception that ends it. Raises what `Group.open` does."""
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
