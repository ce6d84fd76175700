"""How much of a GPU's memory is in use, asked of the driver without making a context."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Generator
from typing import Any

_SUCCESS, _TOO_FEW = 0, 7  # NVML_SUCCESS, NVML_ERROR_INSUFFICIENT_SIZE
_UNKNOWN = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE
_MOST_PROCESSES = 4096


class _MemoryInfo(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t, as the third version of its call fills it."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def used_bytes(pci_bus_id: str) -> int | None:
    """Bytes in use by everyone on the GPU at `pci_bus_id`; None where the driver's library does not tell."""
    with _device(pci_bus_id) as (nvml, device):
        if nvml is None:
            return None
        info = _MemoryInfo()
        return int(info.used) if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(info)) == _SUCCESS else None


def processes(pci_bus_id: str) -> dict[int, int] | None:
    """Bytes in use on the GPU at `pci_bus_id` by process; None where the driver's library does not tell, as it does not
    of other containers' processes. In a container the numbers may be those of the machine outside."""
    with _device(pci_bus_id) as (nvml, device):
        if nvml is None:
            return None
        call = getattr(nvml, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if call is None:
            return None
        room = 64
        while room <= _MOST_PROCESSES:
            count, found = ctypes.c_uint(room), (_Process * room)()
            status = call(device, ctypes.byref(count), found)
            if status == _SUCCESS:
                told = [(int(p.pid), int(p.used_bytes)) for p in found[: count.value]]
                return dict(told) if all(used != _UNKNOWN for _, used in told) else None
            if status != _TOO_FEW:
                return None
            room *= 4
    return None


@contextlib.contextmanager
def _device(pci_bus_id: str) -> Generator[tuple[Any, ctypes.c_void_p]]:
    """The driver's library, None where it does not know this GPU, and the library's handle of it."""
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
        known = nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id.encode(), ctypes.byref(device)) == _SUCCESS
        yield nvml if known else None, device
    finally:
        nvml.nvmlShutdown()
