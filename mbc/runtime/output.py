"""An output that stays in a GPU's memory, for readers there: PyTorch, CuPy, JAX, Numba, PyCUDA."""

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
from mbc.runtime.turns import refuse_copy

Array = NDArray[Any]

_NO_WAIT, _LEGACY_STREAM = -1, 1  # as DLPack's Python protocol numbers streams of CUDA
_CUDA = 2


class DeviceOutput:
    """Some rows of an output where the program wrote them; nothing is copied until a caller reads them.

    The output is valid until the next `step` or `forward` overwrites it, or until `close`. A later read raises MBC179,
    a read in another thread or a forked process MBC235. The output cannot be copied or pickled (MBC234).

    Reads on the legacy default stream (PyTorch's default) are ordered with the module's programs. Reads on another
    stream must end before the next call. bf16, which the CUDA array interface does not have, is available through
    DLPack.
    """

    def __init__(
        self, place: Place, rows: int, address: int, stream: Any, device: int, fetch: Callable[[], Array],
        check_home: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Describe the first `rows` rows of an output.

        Args:
            place: Where the output is in the arena.
            rows: Number of rows.
            address: Address of the output in device memory.
            stream: PyCUDA's stream on which the program runs.
            device: Number of the GPU.
            fetch: Returns a copy of the whole output in host memory.
            check_home: Raises MBC235 in a process or thread in which the output cannot be read.
        """
        self.shape = (rows, *place.shape[1:]) if rows < place.shape[0] else place.shape
        self.dtype = place.dtype
        self._place, self._address, self._stream, self._device, self._fetch = place, address, stream, device, fetch
        self._check_home = check_home
        self._gone = False

    def expire(self) -> None:
        """Make the output invalid: the next program is about to overwrite it, or the arena is given back."""
        self._gone = True

    def numpy(self) -> Array:
        """Return a canonical copy in host memory, as `forward` returns it."""
        self._check()
        return self._fetch()[: self.shape[0]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return a copy in host memory.

        Raises:
            ValueError: The caller asks for an array without a copy.
        """
        if copy is False:
            raise ValueError("the output is in the memory of a GPU: NumPy has to copy it")
        return np.asarray(self.numpy(), dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html.

        Raises:
            AttributeError: The output is bf16, which the interface does not have.
        """
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
        """Return DLPack's type and number of the GPU."""
        return _CUDA, self._device

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> object:
        """Return a DLPack capsule; `stream` is the handle of the stream that will read the output."""
        self._check()
        if stream not in (None, _NO_WAIT, _LEGACY_STREAM):
            # Another library's stream, of which only the handle is available.
            self._stream.synchronize()
        return capsule(self, self._address, (_CUDA, self._device), self.dtype, self.shape, self._strides())

    def __reduce_ex__(self, _: object) -> NoReturn:
        """Raise MBC234: a copy would not notice that the next program overwrites its memory."""
        refuse_copy("an output that was left on the GPU", "copy it to host memory: output.numpy()")

    def __repr__(self) -> str:
        """Return the output's name, type, shape and address, or `overwritten`."""
        state = "overwritten" if self._gone else f"at 0x{self._address:x}"
        return f"<output '{self._place.value}' {self.dtype} {list(self.shape)} on GPU {self._device}, {state}>"

    def _strides(self) -> tuple[int, ...]:
        """Return the stride of each canonical axis, in elements."""
        shape = self._place.shape
        order = list(range(len(shape)))
        if self._place.layout is Layout.CHANNELS_LAST and len(shape) > 2:
            order.append(order.pop(1))
        strides = {axis: math.prod(shape[later] for later in order[i + 1 :]) for i, axis in enumerate(order)}
        return tuple(strides[axis] for axis in range(len(shape)))

    def _check(self) -> None:
        self._check_home()
        if self._gone:
            raise MbcError(
                "MBC179",
                f"output '{self._place.value}' is gone: a later step or forward overwrote it on the GPU, or close"
                " freed it",
                "read it before the next call, or leave out copy=False",
            )
