"""The memory of a GPU that is in use, read from the driver without creating a context."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Generator
from typing import Any

_SUCCESS, _TOO_FEW = 0, 7  # NVML_SUCCESS, NVML_ERROR_INSUFFICIENT_SIZE
_UNKNOWN = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE
_MOST_PROCESSES = 4096


class _MemoryInfo(ctypes.Structure):
    """The struct nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    """The struct nvmlProcessInfo_t as version 3 of its function fills it."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def used_bytes(pci_bus_id: str) -> int | None:
    """Return the bytes that all processes use on the GPU at `pci_bus_id`; None if NVML does not report them."""
    with _device(pci_bus_id) as (nvml, device):
        if nvml is None:
            return None
        info = _MemoryInfo()
        return int(info.used) if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(info)) == _SUCCESS else None


def processes(pci_bus_id: str) -> dict[int, int] | None:
    """Return the bytes in use on the GPU at `pci_bus_id` by process number; None if NVML does not report them.

    NVML does not report the processes of other containers. In a container the process numbers may be those of the
    machine outside.
    """
    with _device(pci_bus_id) as (nvml, device):
        if nvml is None:
            return None
        call = getattr(nvml, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if call is None:
            return None
        room = 64
        while room <= _MOST_PROCESSES:
            count, entries = ctypes.c_uint(room), (_Process * room)()
            status = call(device, ctypes.byref(count), entries)
            if status == _SUCCESS:
                sizes = [(int(p.pid), int(p.used_bytes)) for p in entries[: count.value]]
                return dict(sizes) if all(used != _UNKNOWN for _, used in sizes) else None
            if status != _TOO_FEW:
                return None
            room *= 4
    return None


@contextlib.contextmanager
def _device(pci_bus_id: str) -> Generator[tuple[Any, ctypes.c_void_p]]:
    """Yield NVML and its handle of the GPU; None in place of NVML if it does not know this GPU."""
    device = ctypes.c_void_p()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None, device
        return
    if nvml.nvmlInit_v2() != _SUCCESS:
        yield None, device
        return
    try:
        status = nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id.encode(), ctypes.byref(device))
        yield nvml if status == _SUCCESS else None, device
    finally:
        nvml.nvmlShutdown()
