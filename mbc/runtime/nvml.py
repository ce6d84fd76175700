"""How much of a GPU's memory is in use, asked of the driver without making a context."""

from __future__ import annotations

import ctypes


class _MemoryInfo(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def used_bytes(pci_bus_id: str) -> int | None:
    """Bytes in use by everyone on the GPU at `pci_bus_id`; None where the driver's library does not tell."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        device, info = ctypes.c_void_p(), _MemoryInfo()
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id.encode(), ctypes.byref(device)) != 0:
            return None
        return int(info.used) if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(info)) == 0 else None
    finally:
        nvml.nvmlShutdown()
