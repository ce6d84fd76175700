"""Sums and gathers of NumPy arrays over ranks, through mpi4py, imported here alone and only when it is used."""

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

_CHUNK_BYTES = 1 << 24  # of each rank at a time: memory for a sum is this much times the number of ranks
_POLLS = 50  # before a wait gives the CPU away
_SLEEP_S = 1e-4


class MpiCollectives:
    """What ranks compute together, the same bits on all ranks and in every run.

    For a sum each rank gets the parts of all and adds them in the order of ranks. `Allreduce` would move fewer bytes,
    but the standard only recommends that its order of additions be fixed. A wait polls and sleeps, whatever the MPI
    does when it is idle (most spin), and calls `check` in between, which raises where another rank has failed.
    """

    def __init__(self, environment: RankEnvironment, check: Callable[[], None] = lambda: None) -> None:
        self._mpi, self._world = open_world(environment)
        self._size = environment.size
        self._check = check

    def add(self, array: NDArray[Any]) -> None:
        """Replace the elements of a C-contiguous array by their sums, in the array's own type."""
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
        """[ranks, ...]: the arrays of all ranks in their order."""
        own = np.ascontiguousarray(array)
        got = np.empty((self._size, *own.shape), own.dtype)
        self._gather(own.reshape(-1), got)
        return got

    def _gather(self, own: NDArray[Any], got: NDArray[Any]) -> None:
        byte = self._mpi.BYTE  # types that MPI does not know, fp16 for one, are moved all the same
        wait(self._world.Iallgather([own.view(np.uint8), byte], [got.view(np.uint8), byte]), self._check)


def wait(request: Any, check: Callable[[], None]) -> None:
    """Until a request of MPI's is done."""
    polls = 0
    while not request.Test():
        check()
        polls += 1
        time.sleep(_SLEEP_S if polls > _POLLS else 0)


def open_world(environment: RankEnvironment) -> tuple[Any, Any]:
    """mpi4py's MPI and its world, which is that of the environment.

    MBC265 where mpi4py or an MPI is missing, or where the launcher belongs to another MPI than mpi4py uses: every
    process then is alone in a world of one.
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
    """The orderly end of an MPI that `open_world` began, which waits for all ranks. After a failure a rank ends
    without: mpiexec then ends the others, where MPI itself would wait for them."""
    package: Any = sys.modules.get("mpi4py")
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and package.rc.finalize is False and not mpi.Is_finalized():
        mpi.Finalize()
