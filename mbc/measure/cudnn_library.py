"""cuDNN's backend API through ctypes: calls, and descriptors as Python objects.

The backend API has five calls (create, set attribute, finalize, get attribute, execute) on typed descriptors; see
NVIDIA, "cuDNN Backend API", https://docs.nvidia.com/deeplearning/cudnn/backend/latest/.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

from mbc.errors import MbcError
from mbc.hardware.cudnn_version import load_cudnn
from mbc.measure.cudnn_constants import Constant

_CTYPES: dict[int, Any] = {
    Constant.TYPE_HANDLE: ctypes.c_void_p,
    Constant.TYPE_BOOLEAN: ctypes.c_bool,
    Constant.TYPE_INT64: ctypes.c_int64,
    Constant.TYPE_FLOAT: ctypes.c_float,
    Constant.TYPE_DOUBLE: ctypes.c_double,
    Constant.TYPE_VOID_PTR: ctypes.c_void_p,
    Constant.TYPE_BACKEND_DESCRIPTOR: ctypes.c_void_p,
    Constant.TYPE_CHAR: ctypes.c_char,
}


class CudnnRefusal(MbcError):
    """An error that cuDNN returned (MBC079); often cuDNN only lacks an engine for the operation."""


class Library:
    """A loaded cuDNN; `version` is the number that `cudnnGetVersion` returns, 91900 for 9.19.0."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Declare the argument types of the functions."""
        self._library = library
        library.cudnnGetErrorString.restype = ctypes.c_char_p
        library.cudnnGetErrorString.argtypes = [ctypes.c_int]
        library.cudnnGetLastErrorString.restype = None
        library.cudnnGetLastErrorString.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        library.cudnnGetVersion.restype = ctypes.c_size_t
        library.cudnnCreate.argtypes = [ctypes.c_void_p]
        library.cudnnDestroy.argtypes = [ctypes.c_void_p]
        library.cudnnSetStream.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        library.cudnnBackendCreateDescriptor.argtypes = [ctypes.c_int, ctypes.c_void_p]
        library.cudnnBackendDestroyDescriptor.argtypes = [ctypes.c_void_p]
        library.cudnnBackendFinalize.argtypes = [ctypes.c_void_p]
        attribute = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
        library.cudnnBackendSetAttribute.argtypes = [*attribute, ctypes.c_void_p]
        library.cudnnBackendGetAttribute.argtypes = [*attribute, ctypes.c_void_p, ctypes.c_void_p]
        library.cudnnBackendExecute.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        self.version = int(library.cudnnGetVersion())

    @staticmethod
    def load() -> Library:
        """Load the cuDNN of this machine.

        Raises:
            MbcError: MBC078, there is none.
        """
        return Library(load_cudnn())

    def call(self, function: str, *arguments: object) -> None:
        """Call `function`.

        Raises:
            CudnnRefusal: MBC079, the call failed; the message is cuDNN's.
        """
        status: int = getattr(self._library, function)(*arguments)
        if status:
            detail = ctypes.create_string_buffer(1024)
            self._library.cudnnGetLastErrorString(detail, 1024)
            name = self._library.cudnnGetErrorString(status).decode()
            raise CudnnRefusal(
                "MBC079", f"cuDNN refused {function}: {name}", detail.value.decode(errors="replace").strip()
            )

    def create_handle(self) -> int:
        """Return a cuDNN handle of the current CUDA context, which `destroy_handle` frees."""
        handle = ctypes.c_void_p()
        self.call("cudnnCreate", ctypes.byref(handle))
        return handle.value or 0

    def destroy_handle(self, handle: int) -> None:
        """Free a handle of `create_handle`."""
        self.call("cudnnDestroy", handle)

    def set_stream(self, handle: int, stream: int) -> None:
        """Make `handle` execute on the CUDA stream `stream`."""
        self.call("cudnnSetStream", handle, stream)


class Descriptor:
    """One backend descriptor, destroyed with the object; descriptors that it refers to live as long."""

    def __init__(self, library: Library, kind: int) -> None:
        """Create a descriptor of the kind `kind` (a `BACKEND_` constant)."""
        self._library = library
        self._parts: list[Descriptor] = []
        self._pointer = ctypes.c_void_p()
        library.call("cudnnBackendCreateDescriptor", kind, ctypes.byref(self._pointer))

    def __del__(self) -> None:
        """Destroy the descriptor."""
        # The creation may have failed, and the library may already be unloaded when the interpreter ends.
        if self._pointer and not sys.is_finalizing():
            self._library.call("cudnnBackendDestroyDescriptor", self._pointer)

    @property
    def pointer(self) -> ctypes.c_void_p:
        """The descriptor as the API takes it."""
        return self._pointer

    def set(self, attribute: int, kind: int, values: Sequence[int | float | bool | None]) -> Descriptor:
        """Set `attribute`, an array of elements of the type `kind` (a `TYPE_` constant), and return the descriptor."""
        array = (_CTYPES.get(kind, ctypes.c_int) * len(values))(*values)
        self._library.call("cudnnBackendSetAttribute", self._pointer, attribute, kind, len(values), array)
        return self

    def set_text(self, attribute: int, text: str) -> Descriptor:
        """Set `attribute` to a text, and return the descriptor."""
        data = ctypes.create_string_buffer(text.encode())
        size = len(data)
        self._library.call("cudnnBackendSetAttribute", self._pointer, attribute, Constant.TYPE_CHAR, size, data)
        return self

    def set_parts(self, attribute: int, parts: Sequence[Descriptor]) -> Descriptor:
        """Set `attribute` to other descriptors, and return this descriptor."""
        self._parts.extend(parts)
        return self.set(attribute, Constant.TYPE_BACKEND_DESCRIPTOR, [part.pointer.value for part in parts])

    def finalize(self) -> Descriptor:
        """Finalize the descriptor and return it."""
        self._library.call("cudnnBackendFinalize", self._pointer)
        return self

    def count(self, attribute: int, kind: int) -> int:
        """Return the number of elements of `attribute`."""
        count = ctypes.c_int64()
        self._library.call("cudnnBackendGetAttribute", self._pointer, attribute, kind, 0, ctypes.byref(count), None)
        return count.value

    def get(self, attribute: int, kind: int, most: int = 1) -> list[int]:
        """Return up to `most` elements of an attribute of integers or enumerators."""
        array = (_CTYPES.get(kind, ctypes.c_int) * most)()
        count = ctypes.c_int64()
        self._library.call("cudnnBackendGetAttribute", self._pointer, attribute, kind, most, ctypes.byref(count), array)
        return [int(value) for value in array[: min(most, count.value)]]

    def get_parts(self, attribute: int, kind: int, most: int) -> list[Descriptor]:
        """Return up to `most` descriptors of the kind `kind` (a `BACKEND_` constant) in `attribute`."""
        parts = [Descriptor(self._library, kind) for _ in range(most)]
        array = (ctypes.c_void_p * most)(*[part.pointer.value for part in parts])
        count = ctypes.c_int64()
        self._library.call(
            "cudnnBackendGetAttribute",
            self._pointer,
            attribute,
            Constant.TYPE_BACKEND_DESCRIPTOR,
            most,
            ctypes.byref(count),
            array,
        )
        return parts[: count.value]
