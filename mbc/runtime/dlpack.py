"""DLPack (dlpack.h, version 0.8): passes an array in device memory from one library to another without a copy."""

from __future__ import annotations

import ctypes
from typing import Any

from mbc.ir.types import DType

NAME = b"dltensor"  # name of a capsule that no consumer has taken over yet
KINDS = {0: "i", 1: "u", 2: "f", 4: "bf", 6: "b"}  # DLDataTypeCode as NumPy type characters

_CODES = {DType.FP64: 2, DType.FP32: 2, DType.FP16: 2, DType.BF16: 4, DType.INT32: 0, DType.UINT8: 1}


class DlTensor(ctypes.Structure):
    """DLTensor, which is the first field of DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor. `context` is the Python object that keeps the struct and the array alive."""

    _fields_ = (("tensor", DlTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


def tensor_of(taken: object) -> DlTensor:
    """Return the tensor that a capsule describes; the caller keeps the capsule as long as it uses the tensor."""
    pointer: Any = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return DlTensor.from_address(pointer(taken, NAME))


def capsule(
    owner: object, address: int, device: tuple[int, int], dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...]
) -> object:
    """Return a capsule over memory that `owner` keeps alive.

    Args:
        owner: Object that keeps the memory alive.
        address: Address of the first element.
        device: DLPack's type and number of the device.
        dtype: Type of the elements.
        shape: Elements of each axis.
        strides: Strides of each axis, in elements.
    """
    sizes = ctypes.c_int64 * len(shape)
    managed = _Managed()
    extents, steps = sizes(*shape), sizes(*strides)
    managed.tensor = DlTensor(address, *device, len(shape), _CODES[dtype], 8 * dtype.size_bytes, 1, extents, steps, 0)
    kept = (owner, managed, extents, steps)
    managed.context = id(kept)
    managed.deleter = ctypes.cast(_delete, ctypes.c_void_p)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    new: Any = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(managed), NAME, ctypes.cast(_discard, ctypes.c_void_p))


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(managed: int) -> None:
    """Free a tensor that its consumer does not need any more."""
    release: Any = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("Py_DecRef", ctypes.pythonapi))
    release(_Managed.from_address(managed).context)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _discard(unused: int) -> None:
    """Free a capsule; if no consumer took it over, its name is unchanged and the tensor is freed, too."""
    valid: Any = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
        ("PyCapsule_IsValid", ctypes.pythonapi)
    )
    pointer: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    if valid(unused, NAME):
        _delete(pointer(unused, NAME))
