"""The calls of CUDA's driver that the tests need, through ctypes: the GPU machine needs no package but NumPy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray


class Gpu:
    """Device 0 in its primary context; `close` frees everything that was allocated."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            pytest.skip(f"needs an NVIDIA GPU and its driver: {error}")
        if self._cuda.cuInit(0) != 0:
            pytest.skip("needs an NVIDIA GPU: the driver finds none")
        self._device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(self._device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._call("cuCtxSetCurrent", self._context)
        self._memory: list[ctypes.c_uint64] = []

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        assert status == 0, f"{name} failed with {status}"

    @property
    def architecture(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(major), 75, self._device)
        self._call("cuDeviceGetAttribute", ctypes.byref(minor), 76, self._device)
        return f"sm_{major.value}{minor.value}"

    def allocate(self, size_bytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        self._memory.append(address)
        return address.value

    def stream(self) -> int:
        handle = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(handle), 1)
        assert handle.value
        return handle.value

    def write(self, address: int, data: NDArray[np.uint8]) -> None:
        self._call(
            "cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes)
        )

    def read(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        data = np.empty(size_bytes, np.uint8)
        self._call(
            "cuMemcpyDtoH_v2", ctypes.c_void_p(data.ctypes.data), ctypes.c_uint64(address), ctypes.c_size_t(size_bytes)
        )
        return data

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def close(self) -> None:
        for address in self._memory:
            self._cuda.cuMemFree_v2(address)
        self._cuda.cuDevicePrimaryCtxRelease_v2(self._device)
