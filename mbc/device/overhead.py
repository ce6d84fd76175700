"""Device memory outside the arena: what the context, the libraries and a step's kernels take.

NVML counts it from outside, so that the context itself is seen. The GPU must do nothing else meanwhile.
"""

from __future__ import annotations

import ctypes

from mbc.device.gpu import Gpu, open_context
from mbc.device.profile import Overhead
from mbc.errors import MbcError


class _MemoryInfo(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Meter:
    """Memory in use on one GPU, by all processes. MBC077 where NVML does not answer."""

    def __init__(self, index: int = 0) -> None:
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise MbcError(
                "MBC077", "measuring needs a GPU, and none can be used here: NVML is missing", "run `mbc doctor`"
            ) from error
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(self._device))

    def _call(self, function: str, *arguments: object) -> None:
        status: int = getattr(self._nvml, function)(*arguments)
        if status:
            raise MbcError("MBC077", f"{function} failed with NVML error {status}", "run `mbc doctor`")

    def used_bytes(self) -> int:
        info = _MemoryInfo()
        self._call("nvmlDeviceGetMemoryInfo", self._device, ctypes.byref(info))
        return int(info.used)


def measure_libraries(index: int = 0) -> tuple[Overhead, ...]:
    """What a bare context takes, and then cuDNN with it. To be called before anything else in the process uses CUDA."""
    meter = Meter(index)
    before = meter.used_bytes()
    open_context()
    context_bytes = meter.used_bytes() - before
    with Gpu(memory_share=0.0) as gpu:
        library_bytes = meter.used_bytes() - before
        cudnn = gpu.library.version
    return Overhead("context", "", context_bytes), Overhead("libraries", f"cuDNN {cudnn}", library_bytes)
