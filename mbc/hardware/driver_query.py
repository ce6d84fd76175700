"""Figures of the GPUs that CUDA sees, from the driver's library; no toolkit is needed.

This file is run as a program of its own: the process that asks does not open CUDA, whose choice of GPUs would then be
final and which a forked process could not use.
"""

from __future__ import annotations

import ctypes
import json
import sys
import uuid
from typing import Any

# CUDA Driver API, CUdevice_attribute.
_ATTRIBUTES = {
    "multiprocessors": 16, "clock_khz": 13, "memory_clock_khz": 36, "bus_bits": 37, "l2_bytes": 38,
    "shared_bytes": 97, "major": 75, "minor": 76, "integrated": 18,
}  # fmt: skip


def devices(library: str) -> list[dict[str, Any]]:
    """Return the figures of every GPU in CUDA's order; none if there is no driver, or it does not start."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(ctypes.c_uint(0)) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [_figures(cuda, index) for index in range(count.value)]


def _figures(cuda: ctypes.CDLL, index: int) -> dict[str, Any]:
    device, memory, value = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_int()
    name, identifier = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
    cuda.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index))
    cuda.cuDeviceGetName(name, ctypes.c_int(len(name)), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    cuda.cuDeviceGetUuid_v2(ctypes.byref(identifier), device)
    figures: dict[str, Any] = {}
    for key, attribute in _ATTRIBUTES.items():
        failed = cuda.cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(attribute), device)
        figures[key] = 0 if failed else value.value
    identity = f"GPU-{uuid.UUID(bytes=bytes(identifier))}"
    return {"name": name.value.decode(), "uuid": identity, "memory_bytes": memory.value, **figures}


if __name__ == "__main__":
    print(json.dumps(devices(sys.argv[1])))
