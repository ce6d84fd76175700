"""Streams whose kernels run on some of a GPU's multiprocessors (CUDA Driver API, "Green Contexts").

Memory, libraries and handles stay those of the primary context. A stream that is created while the green context is
current keeps its limit. So do the nodes of graphs that are captured on this stream, whichever stream launches them
(docs/decisions/043-rows-of-unlike-gpus.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache

from mbc.errors import MbcError

_SM = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, which the driver requires
# CU_DEV_SM_RESOURCE_SPLIT_MAX_POTENTIAL_CLUSTER_SIZE, from compute capability 9.0 on: some of cuDNN's kernels are
# launched in clusters of 16 blocks, which the driver's default part (0) refuses.
_SPLITS = (2, 0)


class _Resource(ctypes.Structure):
    """CUdevResource."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("padding", ctypes.c_ubyte * 92),
        ("multiprocessors", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 44),
    )


class _Driver:
    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def status(self, function: str, *arguments: object) -> int | str:
        call = getattr(self._library, function, None)
        return call(*arguments) if call is not None else "(this driver does not have the function)"

    def call(self, function: str, *arguments: object) -> None:
        if status := self.status(function, *arguments):
            raise _no_part(function, status)


@contextmanager
def limited_streams(multiprocessors: int | None) -> Generator[None]:
    """Limit streams that are created within this context to `multiprocessors` of the current context's GPU.

    Args:
        multiprocessors: Number of multiprocessors; None for all of them.

    Yields:
        Nothing.

    Raises:
        MbcError: MBC287 if the driver cannot make a part of this size.
    """
    if multiprocessors is None:
        yield
        return
    driver, device, before = _Driver(), ctypes.c_int(), ctypes.c_void_p()
    driver.call("cuCtxGetDevice", ctypes.byref(device))
    part = _context(device.value, multiprocessors)
    driver.call("cuCtxGetCurrent", ctypes.byref(before))
    driver.call("cuCtxSetCurrent", ctypes.c_void_p(part))
    try:
        yield
    finally:
        driver.call("cuCtxSetCurrent", before)


@cache
def _context(device: int, multiprocessors: int) -> int:
    """Return a context of the part, which exists as long as the process: streams may outlive the caller."""
    driver = _Driver()
    whole = _Resource()
    driver.call("cuDeviceGetDevResource", device, ctypes.byref(whole), _SM)
    part = _split(driver, whole, multiprocessors)
    description, green, context = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    driver.call("cuDevResourceGenerateDesc", ctypes.byref(description), ctypes.byref(part), 1)
    driver.call("cuGreenCtxCreate", ctypes.byref(green), description, device, ctypes.c_uint(_DEFAULT_STREAM))
    driver.call("cuCtxFromGreenCtx", ctypes.byref(context), green)
    assert context.value is not None
    return context.value


def _split(driver: _Driver, whole: _Resource, multiprocessors: int) -> _Resource:
    status: int | str = 0
    part = _Resource()
    for split in _SPLITS:
        part, count = _Resource(), ctypes.c_uint(1)
        status = driver.status(
            "cuDevSmResourceSplitByCount", ctypes.byref(part), ctypes.byref(count), ctypes.byref(whole), None,
            ctypes.c_uint(split), ctypes.c_uint(multiprocessors),
        )  # fmt: skip
        if not status and count.value == 1 and part.multiprocessors == multiprocessors:
            return part
    if status:
        raise _no_part("cuDevSmResourceSplitByCount", status)
    raise MbcError(
        "MBC287",
        f"this GPU cannot make a part of {multiprocessors} multiprocessors: the nearest has {part.multiprocessors}",
        f"plan for a part of {part.multiprocessors}",
    )


def _no_part(function: str, status: int | str) -> MbcError:
    return MbcError(
        "MBC287",
        f"the driver cannot make a part of the GPU: {function} failed with CUDA error {status}",
        "plan for the whole GPU, or install a driver for CUDA 12.4 or newer",
    )
