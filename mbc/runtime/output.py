"""An output left in a GPU's memory, for whoever reads arrays there: PyTorch, CuPy, JAX, Numba, PyCUDA."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.types import DType, Layout
from mbc.runtime.bindings import Place
from mbc.runtime.dlpack import capsule
from mbc.runtime.formats import STORED
from mbc.runtime.turns import no_copy

Array = NDArray[Any]

_NO_WAIT, _LEGACY_STREAM = -1, 1  # as DLPack's Python protocol numbers streams of CUDA
_CUDA = 2


class DeviceOutput:
    """Some rows of an output where the program wrote them: no bytes move until somebody reads them.

    It holds until the next `step` or `forward`, which write over it, or `close`; asked for later it raises MBC179, in
    another thread or a forked process MBC235, and it cannot be copied or pickled (MBC234). What is read on
    the legacy default stream (PyTorch's default) is in order with them by itself; whoever reads on another stream has
    to be done before the next call. bf16, which the CUDA array interface does not know, is had through DLPack.
    """

    def __init__(
        self,
        place: Place,
        rows: int,
        address: int,
        stream: Any,
        device: int,
        fetch: Callable[[], Array],
        check_home: Callable[[], None] = lambda: None,
    ) -> None:
        self.shape = (rows, *place.shape[1:]) if rows < place.shape[0] else place.shape
        self.dtype = place.dtype
        self._place, self._address, self._stream, self._device, self._fetch = place, address, stream, device, fetch
        self._check_home = check_home
        self._gone = False

    def expire(self) -> None:
        """The next program is about to write over it, or the arena is given back."""
        self._gone = True

    def numpy(self) -> Array:
        """A copy in host memory, canonical, as `forward` returns it."""
        self._check()
        return self._fetch()[: self.shape[0]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("it lies in the memory of a GPU: NumPy has to copy it")
        return np.asarray(self.numpy(), dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html"""
        if self.dtype is DType.BF16:
            raise AttributeError("the CUDA array interface has no bf16: read it through DLPack")
        self._check()
        itemsize = self.dtype.size_bytes
        return {
            "shape": self.shape,
            "typestr": STORED[self.dtype].str,
            "data": (self._address, False),
            "version": 3,
            "strides": tuple(itemsize * stride for stride in self._strides()),
            "stream": int(self._stream.handle),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self._device

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> object:
        """`stream`: handle of the stream that will read it."""
        self._check()
        if stream not in (None, _NO_WAIT, _LEGACY_STREAM):
            # A stream of somebody else's, of which only the number is known.
            self._stream.synchronize()
        return capsule(self, self._address, (_CUDA, self._device), self.dtype, self.shape, self._strides())

    def __reduce_ex__(self, _: object) -> NoReturn:
        # Nobody would tell a copy that the next program writes over it.
        raise no_copy("an output that was left on the GPU", "copy it to host memory: output.numpy()")

    def __repr__(self) -> str:
        state = "overwritten" if self._gone else f"at 0x{self._address:x}"
        return f"<output '{self._place.value}' {self.dtype} {list(self.shape)} on GPU {self._device}, {state}>"

    def _strides(self) -> tuple[int, ...]:
        """In elements, by canonical axis."""
        shape = self._place.shape
        order = list(range(len(shape)))
        if self._place.layout is Layout.CHANNELS_LAST and len(shape) > 2:
            order.append(order.pop(1))
        found = {axis: math.prod(shape[later] for later in order[i + 1 :]) for i, axis in enumerate(order)}
        return tuple(found[axis] for axis in range(len(shape)))

    def _check(self) -> None:
        self._check_home()
        if self._gone:
            raise MbcError(
                "MBC179",
                f"output '{self._place.value}' was left on the GPU, and a later step or forward wrote over it, or close"
                " gave it back",
                "read it before the next call, or leave out copy=False",
            )
