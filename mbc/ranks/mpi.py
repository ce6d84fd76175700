"""Sums and gathers of NumPy arrays over ranks, through mpi4py, which only this file imports, and only on use."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ranks.environment import RankEnvironment

INSTALL = "pip install 'mbc-compiler[mpi]' and an MPI (pip install mpich, or the system's)"

_CHUNK_BYTES = 1 << 24  # bytes of each rank at a time: a sum takes this memory times the number of ranks
_POLLS = 50  # polls before a wait starts to sleep
_SLEEP_S = 1e-4


class MpiCollectives:
    """Collectives of ranks on the CPU, with equal bits on all ranks and in every run.

    For a sum each rank gets the parts of all ranks and adds them in the order of ranks. `Allreduce` would move fewer
    bytes, but the MPI standard only recommends that its order of additions be fixed. A wait polls and sleeps, because
    most MPIs spin when they are idle. Between polls it calls `check`, which raises if another rank has failed.
    """

    def __init__(self, environment: RankEnvironment, check: Callable[[], None] = lambda: None) -> None:
        """Open MPI's world; `check` raises if another rank has failed."""
        self._mpi, self._world = open_world(environment)
        self._size = environment.size
        self._check = check

    def add(self, array: NDArray[Any]) -> None:
        """Replace the elements of a C-contiguous array by their sums over the ranks, in the array's own type."""
        flat = array.reshape(-1)
        assert np.shares_memory(flat, array) or not array.size, "a sum in place needs a contiguous array"
        count = max(1, _CHUNK_BYTES // array.itemsize)
        parts = np.empty((self._size, min(count, flat.size)), array.dtype)
        for start in range(0, flat.size, count):
            own = flat[start : start + count]
            got = parts.reshape(-1)[: self._size * own.size].reshape(self._size, own.size)
            self._gather(own, got)
            own[:] = got[0]
            for part in got[1:]:
                own += part

    def gather(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the arrays of all ranks in their order, as one array [ranks, ...]."""
        own = np.ascontiguousarray(array)
        got = np.empty((self._size, *own.shape), own.dtype)
        self._gather(own.reshape(-1), got)
        return got

    def _gather(self, own: NDArray[Any], got: NDArray[Any]) -> None:
        byte = self._mpi.BYTE  # bytes, so that types which MPI does not have, such as fp16, are moved, too
        wait(self._world.Iallgather([own.view(np.uint8), byte], [got.view(np.uint8), byte]), self._check)


def wait(request: Any, check: Callable[[], None]) -> None:
    """Wait until a request of MPI is done; call `check` between polls."""
    polls = 0
    while not request.Test():
        check()
        polls += 1
        time.sleep(_SLEEP_S if polls > _POLLS else 0)


def open_world(environment: RankEnvironment) -> tuple[Any, Any]:
    """Return mpi4py's MPI and its world, which must have the environment's ranks.

    Raises:
        MbcError: MBC265 if mpi4py or an MPI is missing, or if the launcher belongs to another MPI than mpi4py uses:
            every process then is alone in a world of one.
    """
    try:
        package: Any = importlib.import_module("mpi4py")
        if "mpi4py.MPI" not in sys.modules:
            package.rc.finalize = False  # see leave_world
        mpi: Any = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:  # RuntimeError: its wheel finds no MPI
        raise MbcError("MBC265", f"ranks on CPUs need MPI, which cannot be loaded: {error}", INSTALL) from error
    world = mpi.COMM_WORLD
    if (world.size, world.rank) != (environment.size, environment.rank):
        library = mpi.Get_library_version().split("\n")[0].strip()
        raise MbcError(
            "MBC265",
            f"{environment.launcher} started rank {environment.rank} of {environment.size}, but in mpi4py's world"
            f" ({library}) it is rank {world.rank} of {world.size}",
            "start the ranks with the mpiexec of the MPI that mpi4py uses (`mbc doctor` names both), or with"
            " `mbc train --gpus`",
        )
    return mpi, world


def leave_world() -> None:
    """Finalize the MPI that `open_world` initialized, which waits for all ranks.

    After a failure a rank ends without this call: mpiexec then ends the other ranks, for which MPI itself would wait.
    """
    package: Any = sys.modules.get("mpi4py")
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and package.rc.finalize is False and not mpi.Is_finalized():
        mpi.Finalize()
