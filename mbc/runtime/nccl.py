"""One rank's part of an NCCL communicator, one a process.

It does not block (`blocking=0`): a call that is not done yet answers "in progress", and whoever waits polls, so that a
rank that has died is noticed.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Sequence

from mbc.errors import MbcError
from mbc.runtime.nccl_library import (
    COPIES_VERSION,
    IN_PROGRESS,
    SUCCESS,
    SYMMETRIC,
    DataType,
    Nccl,
    Reduction,
    UniqueId,
    config,
    too_old,
)
from mbc.runtime.nccl_library import load_nccl as load_nccl

CONNECT_S = 60.0  # for all ranks to create a communicator, or to end one
_SPIN_S, _POLL_S = 1e-3, 1e-4  # polled without sleeping for so long, then so often


def poll(done: Callable[[], bool], limit_s: float = math.inf) -> bool:
    """Until `done()`, or the time is over; whether it was in time."""
    began_s = time.monotonic()
    while not done():
        waited_s = time.monotonic() - began_s
        if waited_s > limit_s:
            return False
        if waited_s > _SPIN_S:
            time.sleep(_POLL_S)
    return True


class Communicator:
    """One rank's part of a communicator, on the CUDA device that is current. All ranks create it together and call the
    same collectives in the same order.

    A CUDA graph with a collective in it holds the communicator's buffers: destroy graphs first, then `close`. A
    collective that is captured has to be settled before the capture goes on (`settle`): NCCL enqueues it in a thread of
    its own, since the communicator does not block. Generated code does the same.
    """

    def __init__(
        self, nccl: Nccl, unique_id: bytes, rank: int, size: int, max_ctas: int | None = None,
        timeout_s: float = CONNECT_S,
    ) -> None:  # fmt: skip
        """`max_ctas`: thread blocks of a collective at most; 0: copies, in memory that is registered. MBC272 where NCCL
        refuses, MBC273 where the other ranks do not come in time."""
        self._nccl, self._timeout_s = nccl, timeout_s
        self.rank, self.size = rank, size
        self._handle = ctypes.c_void_p()
        self._windows: list[ctypes.c_void_p] = []
        self._handle_lock = threading.Lock()  # `abort` may be called in another thread
        identity, chosen = UniqueId.from_buffer_copy(unique_id), config(max_ctas)
        nccl.call(
            "ncclCommInitRankConfig", ctypes.byref(self._handle), size, identity, rank, ctypes.byref(chosen)
        )  # fmt: skip
        self.settle()

    @property
    def handle(self) -> int:
        """ncclComm_t; 0 after `close` and `abort`."""
        return self._handle.value or 0

    def all_reduce(
        self, address: int, count: int, stream: int, kind: DataType = DataType.FP32, by: Reduction = Reduction.SUM
    ) -> None:
        """`count` elements of every rank, reduced in place."""
        self._collective("ncclAllReduce", address, address, count, kind, by, self.handle, stream)

    def reduce_scatter(self, address: int, count: int, stream: int, kind: DataType = DataType.FP32) -> None:
        """`count` elements a rank: rank r's part of the sum lands where its part lies in its own operand."""
        own = address + self.rank * count * kind.size_bytes
        self._collective("ncclReduceScatter", address, own, count, kind, Reduction.SUM, self.handle, stream)

    def all_gather(self, address: int, count: int, stream: int, kind: DataType = DataType.FP32) -> None:
        """`count` elements a rank, of which this rank's lie at their place already."""
        own = address + self.rank * count * kind.size_bytes
        self._collective("ncclAllGather", own, address, count, kind, self.handle, stream)

    def gather_parts(self, address: int, part_bytes: int, size_bytes: int, stream: int) -> None:
        """Rank r has the bytes from r * `part_bytes` on, so many or up to `size_bytes`, at their place, and gets those
        of all others."""
        if size_bytes == part_bytes * self.size:
            self.all_gather(address, part_bytes, stream, DataType.UINT8)
            return
        self._nccl.call("ncclGroupStart")
        for root, start in enumerate(range(0, size_bytes, part_bytes)):
            at, count = address + start, min(part_bytes, size_bytes - start)
            self._nccl.call(
                "ncclBroadcast", at, at, count, DataType.UINT8, root, self.handle, stream, communicator=self.handle
            )
        self._collective("ncclGroupEnd")

    def all_to_all(self, address: int, to: int, count: int, stream: int, kind: DataType = DataType.FP32) -> None:
        """`count` elements from every rank to every rank."""
        self._collective("ncclAlltoAll", address, to, count, kind, self.handle, stream)

    def register(self, address: int, size_bytes: int) -> bool:
        """Collective: let copy engines reach memory of `Nccl.allocate`, which every rank uses alike, on all ranks.
        False where the GPUs do not reach each other's memory."""
        window = ctypes.c_void_p()
        self._nccl.call(
            "ncclCommWindowRegister", self._handle, address, size_bytes, ctypes.byref(window), SYMMETRIC,
            communicator=self.handle,
        )  # fmt: skip
        self.settle()  # whatever it answered: it says that it is done while it is in progress
        if window:
            self._windows.append(window)
        return bool(window)

    def _collective(self, function: str, *arguments: int) -> None:
        if not self._nccl.call(function, *arguments, communicator=self.handle):
            self.settle()

    def check(self) -> bool:
        """Whether nothing is in progress on the host's side; aborts and raises MBC272 where a collective has failed, or
        was aborted by another thread."""
        state = ctypes.c_int()
        with self._handle_lock:
            if not self.handle:
                raise MbcError("MBC272", "the communicator was aborted", "see what the rank that failed said")
            self._nccl.call("ncclCommGetAsyncError", self._handle, ctypes.byref(state), communicator=self.handle)
        if state.value not in (SUCCESS, IN_PROGRESS):
            failure = self._nccl.failure("a collective", state.value, self.handle)
            self.abort()
            raise failure
        return state.value == SUCCESS

    def settle(self) -> None:
        """Wait until the host's side of the last call is done."""
        self.wait(lambda: True)

    def wait(self, done: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Poll until nothing is in progress and `done()`, as of an event on the GPU. Aborts, so that what runs on the
        GPU ends, and raises MBC272 where a collective has failed, MBC273 when the time is over."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        if not poll(lambda: self.check() and done(), limit_s):
            self.abort()
            raise MbcError(
                "MBC273",
                f"rank {self.rank} of {self.size} has waited {limit_s:g} s for the other ranks",
                "look at what the other ranks say: one may have ended, or work far longer than this one",
            )

    def abort(self) -> None:
        """End whatever runs, here only, and let go of everything. The other ranks find out by a time-out."""
        with self._handle_lock:
            handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:  # without the lock: NCCL waits here for the end of what holds the communicator
            self._nccl.calls.ncclCommAbort(handle)

    def close(self) -> None:
        """Collective: every rank closes. CUDA graphs that use it must be destroyed before."""
        if self.handle:
            for window in self._windows:
                self._nccl.call("ncclCommWindowDeregister", self._handle, window, communicator=self.handle)
                self.settle()
            self._nccl.call("ncclCommFinalize", self._handle, communicator=self.handle)
            self.settle()
            self._nccl.call("ncclCommDestroy", self._handle, communicator=self.handle)
            self._handle = ctypes.c_void_p()


class SymmetricMemory(int):
    """The address of device memory that a communicator can register. MBC271 where NCCL is too old, MBC272 where so much
    is not free."""

    size_bytes: int

    def __new__(cls, nccl: Nccl, size_bytes: int) -> SymmetricMemory:
        if not nccl.has_copies:
            raise too_old(nccl.version, COPIES_VERSION, "sums by copy engines, which the plan wants")
        made = super().__new__(cls, nccl.allocate(size_bytes))
        made.size_bytes, made._nccl = size_bytes, nccl
        return made

    def register(self, communicator: Communicator) -> None:
        """Collective, as `Communicator.register`. MBC272 where the GPUs do not reach each other's memory."""
        if not communicator.register(int(self), self.size_bytes):
            raise MbcError(
                "MBC272",
                "the plan sums gradients by copy engines, and GPUs here do not reach each other's memory",
                "compile with a profile of this machine (mbc profile --gpu all), which then has no such sums",
            )

    def free(self) -> None:
        """Once no communicator has it registered."""
        self._nccl.free(int(self))

    _nccl: Nccl


def connect(communicator: Communicator, address: int, sizes_bytes: Sequence[int], stream: int) -> None:
    """One all-reduce of each size at `address`, which is overwritten: NCCL connects and allocates for an algorithm when
    it first uses it.

    What NCCL takes of the GPU's memory is what is free before its first communicator is created, less what is free
    after this and a synchronization of the stream. To be done before the overhead of a step is taken, so that this
    memory lies inside the budget.
    """
    for size_bytes in sizes_bytes:
        communicator.all_reduce(address, size_bytes // DataType.FP32.size_bytes, stream)
