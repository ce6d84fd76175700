"""One rank's part of an NCCL communicator; each process has one rank.

The communicator does not block (`blocking=0`): a call that is not done yet answers "in progress", and the caller
polls, so that it notices a rank that has died.
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
    report_too_old,
)
from mbc.runtime.nccl_library import load_nccl as load_nccl

CONNECT_S = 60.0  # time for all ranks to create a communicator, or to end one
_SPIN_S, _POLL_S = 1e-3, 1e-4  # time of polling without sleep, then sleep between two polls


def poll(done: Callable[[], bool], limit_s: float = math.inf) -> bool:
    """Return True as soon as `done()`, or False if `limit_s` seconds have passed before."""
    began_s = time.monotonic()
    while not done():
        waited_s = time.monotonic() - began_s
        if waited_s > limit_s:
            return False
        if waited_s > _SPIN_S:
            time.sleep(_POLL_S)
    return True


class Communicator:
    """One rank's part of a communicator, on the current CUDA device.

    All ranks create it together and call the same collectives in the same order.

    A CUDA graph that contains a collective holds the communicator's buffers: destroy graphs first, then call `close`. A
    captured collective has to be settled before the capture continues (`settle`), because a communicator that does not
    block enqueues it in a thread of its own. Generated code does the same.
    """

    def __init__(
        self, nccl: Nccl, unique_id: bytes, rank: int, size: int, max_ctas: int | None = None,
        timeout_s: float = CONNECT_S,
    ) -> None:  # fmt: skip
        """Create the communicator together with the other ranks.

        Args:
            nccl: The library.
            unique_id: The communicator's identity, which one rank creates (`Nccl.unique_id`) and all share.
            rank: Number of this rank.
            size: Number of ranks.
            max_ctas: Most thread blocks of a collective; 0: copy engines, in registered memory. None: NCCL decides.
            timeout_s: Longest wait for the other ranks, in seconds.

        Raises:
            MbcError: MBC272 if NCCL refuses, MBC273 if the other ranks do not come in time.
        """
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
        """The ncclComm_t; 0 after `close` and `abort`."""
        return self._handle.value or 0

    def all_reduce(
        self, address: int, count: int, stream: int, kind: DataType = DataType.FP32, by: Reduction = Reduction.SUM
    ) -> None:
        """Reduce `count` elements over all ranks, in place."""
        self._collective("ncclAllReduce", address, address, count, kind, by, self.handle, stream)

    def reduce_scatter(self, address: int, count: int, stream: int, kind: DataType = DataType.FP32) -> None:
        """Sum `count` elements for each rank; rank r's part of the sum replaces that part of its own operand."""
        own = address + self.rank * count * kind.size_bytes
        self._collective("ncclReduceScatter", address, own, count, kind, Reduction.SUM, self.handle, stream)

    def all_gather(self, address: int, count: int, stream: int, kind: DataType = DataType.FP32) -> None:
        """Gather `count` elements from each rank; this rank's elements must already be at their place."""
        own = address + self.rank * count * kind.size_bytes
        self._collective("ncclAllGather", own, address, count, kind, self.handle, stream)

    def gather_parts(self, address: int, part_bytes: int, size_bytes: int, stream: int) -> None:
        """Gather the ranks' parts of `size_bytes`, of which the last part may be shorter and others empty.

        Args:
            address: Address of the whole. Rank r's part is there already, from byte r * `part_bytes` on.
            part_bytes: Bytes of a part.
            size_bytes: Bytes of the whole.
            stream: Handle of the stream.
        """
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
        """Send `count` elements from every rank to every rank."""
        self._collective("ncclAlltoAll", address, to, count, kind, self.handle, stream)

    def register(self, address: int, size_bytes: int) -> bool:
        """Register memory of `Nccl.allocate` for copy engines, at the same position on all ranks. Collective.

        Returns:
            False if the GPUs do not reach each other's memory.
        """
        window = ctypes.c_void_p()
        self._nccl.call(
            "ncclCommWindowRegister", self._handle, address, size_bytes, ctypes.byref(window), SYMMETRIC,
            communicator=self.handle,
        )  # fmt: skip
        self.settle()  # whatever the call answered: it reports success while it is still in progress
        if window:
            self._windows.append(window)
        return bool(window)

    def _collective(self, function: str, *arguments: int) -> None:
        if not self._nccl.call(function, *arguments, communicator=self.handle):
            self.settle()

    def check(self) -> bool:
        """Return whether nothing is in progress on the host's side.

        Raises:
            MbcError: MBC272 if a collective has failed, which aborts the communicator, or if another thread has aborted
                it.
        """
        state = ctypes.c_int()
        with self._handle_lock:
            if not self.handle:
                raise MbcError("MBC272", "the communicator was aborted", "see the messages of the rank that failed")
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
        """Wait until nothing is in progress and `done()`, which may for example query an event on the GPU.

        Args:
            done: Returns whether the wait may end.
            timeout_s: Longest wait in seconds; None for the communicator's own limit.

        Raises:
            MbcError: MBC272 if a collective has failed, MBC273 after the time limit. The communicator is aborted first,
                so that its work on the GPU ends.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        if not poll(lambda: self.check() and done(), limit_s):
            self.abort()
            raise MbcError(
                "MBC273",
                f"rank {self.rank} of {self.size} has waited {limit_s:g} s for the other ranks",
                "look at the messages of the other ranks: one may have ended, or be much slower than this one",
            )

    def abort(self) -> None:
        """End all work of this rank's communicator and free it; the other ranks notice by a time-out."""
        with self._handle_lock:
            handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:  # without the lock: NCCL waits here for everything that holds the communicator
            self._nccl.calls.ncclCommAbort(handle)

    def close(self) -> None:
        """Free the communicator; CUDA graphs that use it must be destroyed before. Collective."""
        if self.handle:
            for window in self._windows:
                self._nccl.call("ncclCommWindowDeregister", self._handle, window, communicator=self.handle)
                self.settle()
            self._nccl.call("ncclCommFinalize", self._handle, communicator=self.handle)
            self.settle()
            self._nccl.call("ncclCommDestroy", self._handle, communicator=self.handle)
            self._handle = ctypes.c_void_p()


class SymmetricMemory(int):
    """The address of device memory that a communicator can register."""

    size_bytes: int

    def __new__(cls, nccl: Nccl, size_bytes: int) -> SymmetricMemory:
        """Allocate the memory.

        Raises:
            MbcError: MBC271 if NCCL is too old, MBC272 if too little memory is free.
        """
        if not nccl.has_copies:
            report_too_old(nccl.version, COPIES_VERSION, "the plan's sums by copy engines")
        memory = super().__new__(cls, nccl.allocate(size_bytes))
        memory.size_bytes, memory._nccl = size_bytes, nccl
        return memory

    def register(self, communicator: Communicator) -> None:
        """Register the memory as `Communicator.register` does. Collective.

        Raises:
            MbcError: MBC272 if the GPUs do not reach each other's memory.
        """
        if not communicator.register(int(self), self.size_bytes):
            raise MbcError(
                "MBC272",
                "the plan sums gradients by copy engines, but these GPUs do not reach each other's memory",
                "compile with a profile of this machine (mbc profile --gpu all), so that the plan avoids such sums",
            )

    def free(self) -> None:
        """Free the memory, which must not be registered with a communicator any more."""
        self._nccl.free(int(self))

    _nccl: Nccl


def connect(communicator: Communicator, address: int, sizes_bytes: Sequence[int], stream: int) -> None:
    """Run one all-reduce of each size at `address`, which is overwritten, so that NCCL connects and allocates.

    NCCL does this for an algorithm when it first uses the algorithm. The GPU memory that NCCL takes is the memory free
    before its first communicator is created, less the memory free after this call and a synchronization of the stream.
    Call it before the overhead of a step is measured, so that NCCL's memory counts against the budget.
    """
    for size_bytes in sizes_bytes:
        communicator.all_reduce(address, size_bytes // DataType.FP32.size_bytes, stream)
