"""A GPU to measure on: PyCUDA's primary context, one stream, one block of memory, captured graphs."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.hardware.datasheet import capability_of
from mbc.hardware.numa import near
from mbc.hardware.part import GpuName
from mbc.hardware.streams import ALIGNMENT_BYTES
from mbc.measure.cudnn_graph import Device
from mbc.measure.cudnn_library import Library
from mbc.runtime.green_context import limited_streams

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: libraries may load kernels during the capture


class DoesNotFit(Exception):
    """The operands of a request need more memory than is free."""


def open_context() -> None:
    """Make the primary context current.

    Raises:
        MbcError: MBC077, there is no usable GPU, or PyCUDA is missing.
    """
    if importlib.util.find_spec("pycuda") is None:
        raise MbcError("MBC077", "measuring needs PyCUDA, which is not installed", "install 'mbc-compiler[cuda]'")
    try:
        importlib.import_module("pycuda.autoprimaryctx")
    except Exception as error:  # PyCUDA has its own exceptions, which cannot be imported without a driver
        raise MbcError(
            "MBC077", f"measuring needs a GPU, but none can be used on this machine: {error}", "run `mbc doctor`"
        ) from error


class Graph:
    """A captured sequence of launches, which `launch` replays."""

    def __init__(self, gpu: Gpu, body: Callable[[], None], stream: ctypes.c_void_p | None = None) -> None:
        """Capture the launches of `body`.

        Args:
            gpu: The GPU.
            body: Enqueues the launches.
            stream: Handle of the stream that `body` uses and that replays the graph; None for the GPU's own.

        Raises:
            MbcError: MBC077, the launches cannot be captured.
        """
        self._gpu = gpu
        self._stream = stream or gpu.stream_handle
        self._executable = ctypes.c_void_p()
        graph = ctypes.c_void_p()
        gpu.driver_call("cuStreamBeginCapture_v2", self._stream, _RELAXED)
        try:
            body()
        finally:
            # End the capture even if the body failed, because the stream would be unusable otherwise.
            status = gpu.driver_status("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        if status or not graph:
            raise MbcError("MBC077", f"the calls cannot be captured into a CUDA graph (CUDA error {status})")
        try:
            gpu.driver_call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), graph, ctypes.c_ulonglong(0))
        finally:
            gpu.driver_call("cuGraphDestroy", graph)

    def launch(self) -> None:
        """Enqueue the graph on its stream."""
        self._gpu.driver_call("cuGraphLaunch", self._executable, self._stream)

    def close(self) -> None:
        """Destroy the graph."""
        if self._executable:
            self._gpu.driver_call("cuGraphExecDestroy", self._executable)
            self._executable = ctypes.c_void_p()


class Gpu:
    """The GPU of this process.

    Memory comes from one block, which is allocated at once and handed out from its start. `reset` frees all of it.
    """

    def __init__(self, memory_share: float = 0.8, multiprocessors: int | None = None, pose: str = "") -> None:
        """Open the GPU.

        Args:
            memory_share: Size of the block as a share of the free memory; 0 for no block.
            multiprocessors: Number of multiprocessors to use, which makes the GPU a part of one; None for all.
            pose: Architecture as which the GPU poses; empty for its own.

        Raises:
            MbcError: MBC077, there is no usable GPU, or PyCUDA is missing; MBC078, there is no cuDNN.
        """
        open_context()
        self.driver: Any = importlib.import_module("pycuda.driver")
        self.failures: tuple[type[Exception], ...] = (self.driver.Error,)  # errors that a call to the GPU may raise
        self._libcuda = ctypes.CDLL("libcuda.so.1")
        device: Any = self.driver.Context.get_device()
        attribute: Any = self.driver.device_attribute
        self.name = str(device.name())
        own = "sm_{}{}".format(*device.compute_capability())
        self.architecture = pose or own
        self.code_architecture = min(self.architecture, own, key=capability_of)  # as of `DeviceSpec`
        self.multiprocessors = int(device.get_attribute(attribute.MULTIPROCESSOR_COUNT))
        self.l2_bytes = int(device.get_attribute(attribute.L2_CACHE_SIZE))
        self.sm_clock_mhz = int(device.get_attribute(attribute.CLOCK_RATE)) // 1000
        self.memory_clock_mhz = int(device.get_attribute(attribute.MEMORY_CLOCK_RATE)) // 1000
        self.part = multiprocessors
        self.name = str(GpuName(self.name, multiprocessors, pose))
        self.multiprocessors = multiprocessors or self.multiprocessors
        self._stream = self.new_stream()
        self.stream_handle = ctypes.c_void_p(int(self._stream.handle))
        self.library = Library.load()
        self._handle = self.library.create_handle()
        self.library.set_stream(self._handle, int(self._stream.handle))
        self.device = Device.from_handle(self.library, self._handle)
        free_bytes, _ = self.driver.mem_get_info()
        self._block_bytes = int(free_bytes * memory_share) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._block: Any = self.driver.mem_alloc(self._block_bytes) if self._block_bytes else None
        self._base = int(self._block) if self._block else 0
        self._used_bytes = 0

    # Memory

    @property
    def left_bytes(self) -> int:
        """Bytes of the block that are not taken."""
        return self._block_bytes - self._used_bytes

    def take(self, size_bytes: int) -> int:
        """Return the address of `size_bytes` bytes of the block, aligned like a plan's buffers.

        Raises:
            DoesNotFit: The block has too few bytes left.
        """
        aligned = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if aligned > self.left_bytes:
            raise DoesNotFit(f"{size_bytes} bytes are needed, {self.left_bytes} are left")
        address = self._base + self._used_bytes
        self._used_bytes += aligned
        return address

    def mark(self) -> int:
        """Return the current position in the block, for `reset`."""
        return self._used_bytes

    def reset(self, mark: int = 0) -> None:
        """Free everything allocated since `mark`."""
        self._used_bytes = mark

    def upload(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copy host data to `address`."""
        self.driver.memcpy_htod(address, np.ascontiguousarray(data))

    def download(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        """Return `size_bytes` bytes at `address`."""
        data = np.empty(size_bytes, np.uint8)
        self.driver.memcpy_dtoh(data, address)
        return data

    def fill(self, address: int, byte: int, size_bytes: int) -> None:
        """Set `size_bytes` bytes at `address` to `byte`."""
        if size_bytes:
            self.driver.memset_d8(address, byte, size_bytes)

    def copy(self, target: int, source: int, size_bytes: int, stream: Any = None) -> None:
        """Enqueue a copy on the GPU's stream, which can be captured, or on a stream of `new_stream`.

        Source and target may be memory of another GPU that this one can access.
        """
        self.driver.memcpy_dtod_async(target, source, size_bytes, stream or self._stream)

    def pinned(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return pinned host memory near the GPU.

        Raises:
            DoesNotFit: The machine does not provide as much.
        """
        try:
            with near(str(self.driver.Context.get_device().pci_bus_id())):
                return self.driver.pagelocked_empty(size_bytes, np.uint8)
        except self.failures as error:
            raise DoesNotFit(f"{size_bytes} bytes of pinned host memory: {error}") from error

    def copy_to_host(self, target: NDArray[np.uint8], source: int, stream: Any = None) -> None:
        """Enqueue a copy from the GPU to pinned memory, on the GPU's stream or one of `new_stream`."""
        self.driver.memcpy_dtoh_async(target, source, stream or self._stream)

    def copy_to_device(self, target: int, source: NDArray[np.uint8], stream: Any = None) -> None:
        """Enqueue a copy from pinned memory to the GPU, on the GPU's stream or one of `new_stream`."""
        self.driver.memcpy_htod_async(target, source, stream or self._stream)

    def repeat(self, address: int, period_bytes: int, size_bytes: int) -> None:
        """Fill `size_bytes` bytes with copies of the first `period_bytes`, by doubling, on the GPU's stream."""
        done = min(period_bytes, size_bytes)
        while done < size_bytes:
            # Whole periods only, so that the next copy continues the pattern.
            count = min(done, size_bytes - done)
            self.copy(address + done, address, count)
            done += count

    # Time

    def synchronize(self) -> None:
        """Wait until the GPU's stream is idle."""
        self._stream.synchronize()

    def new_stream(self) -> Any:
        """Return a stream that runs concurrently with the GPU's own."""
        with limited_streams(self.part):
            return self.driver.Stream()

    def mark_time(self, stream: Any = None) -> Any:
        """Return an event recorded after the stream's work; `later.time_since(earlier)` is in milliseconds."""
        event = self.driver.Event()
        event.record(stream or self._stream)
        return event

    def times_us(self, work: Callable[[], None], count: int) -> list[float]:
        """Return `count` times of the work that `work` enqueues, in microseconds; the GPU is not idle between them."""
        events = [(self.driver.Event(), self.driver.Event()) for _ in range(count)]
        for start, stop in events:
            start.record(self._stream)
            work()
            stop.record(self._stream)
        self.synchronize()
        return [float(stop.time_since(start)) * 1e3 for start, stop in events]

    # Functions that PyCUDA does not offer

    def driver_status(self, function: str, *arguments: object) -> int:
        """Call a function of the CUDA driver and return its status, 0 for success."""
        return int(getattr(self._libcuda, function)(*arguments))

    def driver_call(self, function: str, *arguments: object) -> None:
        """Call a function of the CUDA driver.

        Raises:
            MbcError: MBC077, the call failed.
        """
        status = self.driver_status(function, *arguments)
        if status:
            raise MbcError("MBC077", f"{function} failed with CUDA error {status}")

    @property
    def driver_version(self) -> str:
        """The version of the installed driver according to NVML, else the CUDA version that the driver supports."""
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
            text = ctypes.create_string_buffer(96)
            if not nvml.nvmlInit_v2() and not nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96)):
                return text.value.decode()
        except OSError:
            pass
        return f"CUDA {self.driver.get_driver_version()}"

    def close(self) -> None:
        """Free the cuDNN handle and the block."""
        if self._handle:
            self.synchronize()
            self.library.destroy_handle(self._handle)
            self._handle = 0
            if self._block:
                self._block.free()

    def __enter__(self) -> Gpu:
        """Return this GPU."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the GPU."""
        self.close()
