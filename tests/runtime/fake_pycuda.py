"""PyCUDA's driver without a GPU: device memory is host memory, and queued work runs only when it is waited for.

So code that forgets to wait, or overwrites pinned memory that a queued copy still reads, computes wrong results. With
`Stream.early` all streams except the first do the opposite: they run as soon as the work that they wait for is done, so
that code which lets another stream continue too soon computes wrong results, too. With `Stream.polled` a stream also
runs one more entry each time that it is asked whether it is done.
"""

from __future__ import annotations

import ctypes
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mbc.hardware.streams import Space
from mbc.ops.base import NO_OTHER_RANKS, Collectives
from mbc.plan.model import Plan
from mbc.runtime.cpu import Interpreter


class Error(Exception):
    pass


class OutOfMemory(Error):
    pass


def device_bytes(address: int, size_bytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


class Stream:
    instances: list[Stream] = []  # noqa: RUF012
    early = False
    polled = False

    def __init__(self) -> None:
        Stream.instances.append(self)
        self.handle = 1000 + len(Stream.instances)
        self.queue: list[Callable[[], None] | _Wait] = []
        self.done = 0
        self.running = False

    def append(self, call: Callable[[], None] | _Wait) -> None:
        self.queue.append(call)
        run_early()

    def wait_for_event(self, event: Event) -> None:
        if event.stream is not None:
            self.append(_Wait(event.stream, event.place))

    def synchronize(self, until: int | None = None) -> None:
        while self.done < (len(self.queue) if until is None else until):
            self.run_next()
            run_early()

    def run_next(self) -> None:
        call = self.queue[self.done]
        self.running = True
        if isinstance(call, _Wait):
            call.stream.synchronize(call.place)
        else:
            call()
        self.running = False
        self.done += 1

    def is_done(self) -> bool:
        return self.is_at(len(self.queue))

    def is_at(self, place: int) -> bool:
        if Stream.polled and self.done < place:
            self.run_next()
        return self.done >= place

    @property
    def may_go_on(self) -> bool:
        if self.running or self.done == len(self.queue):
            return False
        call = self.queue[self.done]
        return not isinstance(call, _Wait) or call.stream.done >= call.place


@dataclass
class _Wait:
    """A wait until another stream has run a number of entries."""

    stream: Stream
    place: int


def run_early() -> None:
    for stream in Stream.instances[1:] if Stream.early else ():
        while stream.may_go_on:
            stream.run_next()


class Event:
    def __init__(self) -> None:
        self.stream, self.place = None, 0

    def record(self, stream: Stream) -> None:
        self.stream, self.place = stream, len(stream.queue)

    def query(self) -> bool:
        return self.stream is None or self.stream.is_at(self.place)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize(self.place)

    def time_since(self, earlier: Event) -> float:
        """Return the elapsed time; every entry of a stream takes a millisecond."""
        for event in (self, earlier):
            assert event.stream is not None and event.stream.done >= event.place, "not ready"
        return float(self.place - earlier.place)


def drain() -> None:
    for stream in Stream.instances:
        stream.synchronize()


class Memory:
    def __init__(self, size_bytes: int, gpu: int = 0) -> None:
        self.gpu = gpu
        self.raw = np.full(size_bytes + 256, 0xCD, np.uint8)
        self.address = -(-self.raw.ctypes.data // 256) * 256
        self.freed = False

    def __int__(self) -> int:
        return self.address

    def free(self) -> None:
        assert not self.freed
        self.freed = True


class Copy2D:
    src_pitch = dst_pitch = width_in_bytes = height = 0

    def set_src_device(self, address: int) -> None:
        self.src = address

    def set_dst_device(self, address: int) -> None:
        self.dst = address

    def __call__(self, stream: Stream) -> None:
        def copy() -> None:
            for row in range(self.height):
                source = device_bytes(self.src + row * self.src_pitch, self.width_in_bytes)
                device_bytes(self.dst + row * self.dst_pitch, self.width_in_bytes)[:] = source

        stream.append(copy)


@dataclass
class Gpu:
    """The state of the fake machine."""

    count: int = 1
    joined: bool = True  # any of them reaches any other one
    lendable: int = 1 << 34  # free on those that are not used
    capability: tuple[int, int] = (9, 0)
    free: int = 1 << 34
    pinnable: int = 1 << 34
    pinned: list[weakref.ref[np.ndarray]] = field(default_factory=list[Any])
    allocations: list[Memory] = field(default_factory=list)
    accessed: set[int] = field(default_factory=set)  # numbers of those that lend


def modules(gpu: Gpu) -> dict[str, types.ModuleType]:
    """Return fakes of `pycuda.driver` and `pycuda.autoprimaryctx` for sys.modules."""
    Stream.instances, Stream.early, Stream.polled = [], False, False
    driver: Any = types.ModuleType("pycuda.driver")
    context: Any = types.ModuleType("pycuda.autoprimaryctx")

    class Device:
        def __init__(self, number: int) -> None:
            self.number = number

        @staticmethod
        def count() -> int:
            return gpu.count

        def pci_bus_id(self) -> str:
            return f"0000:{self.number:02x}:00.0"

        def compute_capability(self) -> tuple[int, int]:
            return gpu.capability

        def name(self) -> str:
            return "Fake"

        def total_memory(self) -> int:
            return 1 << 35

        def can_access_peer(self, other: Device) -> bool:
            return gpu.joined and other.number != self.number

        def retain_primary_context(self) -> Primary:
            return Primary(self.number)

    class Context:
        @staticmethod
        def get_current() -> None:
            return None

        @staticmethod
        def synchronize() -> None:
            drain()

        @staticmethod
        def get_device() -> Device:
            return Device(pushed[-1].number if pushed else 0)

        @staticmethod
        def pop() -> None:
            pushed.pop()

        @staticmethod
        def enable_peer_access(peer: Primary) -> None:
            assert not pushed, "access is that of the context that is current"
            if peer.number in gpu.accessed:
                raise Error("cuCtxEnablePeerAccess failed: peer access is already enabled")
            gpu.accessed.add(peer.number)

    @dataclass
    class Primary:
        number: int

        def push(self) -> None:
            pushed.append(self)

    pushed: list[Primary] = []

    def allocate(size_bytes: int) -> Memory:
        gpu.allocations.append(Memory(size_bytes, pushed[-1].number if pushed else 0))
        return gpu.allocations[-1]

    def free_and_all() -> tuple[int, int]:
        return gpu.lendable if pushed else gpu.free, 1 << 35

    def pin(shape: Any, dtype: Any) -> np.ndarray:
        array = np.empty(shape, dtype)
        if array.nbytes > gpu.pinnable:
            raise OutOfMemory("cuMemHostAlloc failed: out of memory")
        gpu.pinned.append(weakref.ref(array))
        return array

    def to_device(target: int, source: np.ndarray) -> None:
        device_bytes(target, source.nbytes)[:] = source.view(np.uint8).reshape(-1)

    def to_host(target: np.ndarray, source: int) -> None:
        target.view(np.uint8).reshape(-1)[:] = device_bytes(source, target.nbytes)

    def within(target: int, source: int, count: int) -> None:
        device_bytes(target, count)[:] = device_bytes(source, count)

    def fill(address: int, value: int, count: int) -> None:
        device_bytes(address, count)[:] = value

    def after_all(call: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            drain()
            call(*arguments)

        return run

    def queued(call: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments: arguments[-1].append(lambda: call(*arguments[:-1]))

    driver.Error, driver.MemoryError = Error, OutOfMemory
    driver.init = lambda: None
    driver.get_driver_version = lambda: 13000
    driver.Device, driver.Context, driver.Stream, driver.Event = Device, Context, Stream, Event
    driver.Memcpy2D = Copy2D
    driver.mem_alloc, driver.mem_get_info = allocate, free_and_all
    driver.pagelocked_empty = pin
    driver.memcpy_htod, driver.memcpy_dtoh = after_all(to_device), after_all(to_host)
    driver.memset_d8 = after_all(fill)
    driver.memcpy_htod_async, driver.memcpy_dtoh_async = queued(to_device), queued(to_host)
    driver.memcpy_dtod_async, driver.memset_d8_async = queued(within), queued(fill)
    context.context = Context()
    return {"pycuda": types.ModuleType("pycuda"), "pycuda.driver": driver, "pycuda.autoprimaryctx": context}


class FakeLibrary:
    """Runs the plan by the interpreter on the fake device's bytes, when its stream is waited for."""

    instances: list[FakeLibrary] = []  # noqa: RUF012
    cudnn_version = 91900
    collectives: Collectives = NO_OTHER_RANKS

    def __init__(self, plan: Plan, folder: object) -> None:
        self.interpreter = Interpreter(plan, collectives=self.collectives)
        self.calls: list[str] = []
        FakeLibrary.instances.append(self)

    def create(
        self, arena: int, arena_bytes: int, host: int, host_bytes: int, peer: int, peer_bytes: int, streams: list[int],
        ranks: Any = None,
    ) -> None:  # fmt: skip
        self.ranks = ranks
        self.peer, self.peer_bytes = peer, peer_bytes
        self.arena = device_bytes(arena, arena_bytes)
        self.host, self.host_bytes = host, host_bytes
        if host:
            self.interpreter._spaces[Space.HOST] = device_bytes(host, host_bytes)
        self.compute = next(stream for stream in Stream.instances if stream.handle == streams[0])
        self.calls.append("create")

    def warm(self) -> None:
        assert not self.arena.any(), "warm-up starts from zeros"
        self.arena[:] = 0xEE
        self.calls.append("warm")

    def capture(self, listener: int | None = None) -> None:
        self.listener = listener
        self.calls.append("capture")

    def run(self, program: str, eager: bool) -> None:
        self.calls.append(f"{program} {'eager' if eager else 'captured'}")

        def run() -> None:
            self.interpreter.arena[:] = self.arena
            self.interpreter.run(program)
            self.arena[:] = self.interpreter.arena

        self.compute.append(run)

    def run_launch(self, program: str, index: int) -> None:
        self.calls.append(f"{program} {index}")
        self.interpreter.arena[:] = self.arena
        self.interpreter.run_launch(program, index)
        self.arena[:] = self.interpreter.arena

    def destroy(self) -> None:
        self.calls.append("destroy")
