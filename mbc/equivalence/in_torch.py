"""Float64 by PyTorch: on a GPU it computes whole launches of the largest networks, for which NumPy would take hours.

This file is imported only if PyTorch is installed. NumPy evaluates kinds without a form (`torch_forms.py`) on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mbc.equivalence.float64 import InNumpy
from mbc.equivalence.torch_convolutions import Tensor, torch
from mbc.equivalence.torch_forms import form_of, padded
from mbc.hardware.streams import Space
from mbc.ir.graph import Attributes
from mbc.ir.types import DType, Layout
from mbc.ops.base import Call
from mbc.ops.pooling import Pool
from mbc.runtime.machine import Machine
from mbc.runtime.shadow import Region

_STORED = {
    DType.FP64: torch.float64, DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16,
    DType.INT32: torch.int32, DType.UINT8: torch.uint8,
}  # fmt: skip


class InTorch:
    """PyTorch's evaluation of float64 operands on one device."""

    name = "PyTorch"
    chunk_bytes = 4 << 30
    out_of_memory: type[Exception] = torch.cuda.OutOfMemoryError

    def __init__(self, seed: int, device: str) -> None:
        """Create the arithmetic on a device, whose random signs depend on `seed`."""
        self._random = torch.Generator(device)
        self._random.manual_seed(seed)
        self._device = device
        self._numpy = InNumpy(seed)

    def load(self, data: Tensor, shape: tuple[int, ...], dtype: DType, layout: Layout) -> Tensor:
        """Return stored bytes as numbers."""
        typed = data.to(self._device).view(_STORED[dtype])
        if layout is Layout.CHANNELS_FIRST or len(shape) <= 2:
            typed = typed.reshape(shape)
        else:
            rows, channels, *spatial = shape
            typed = typed.reshape(rows, *spatial, channels).movedim(-1, 1)
        return typed.to(torch.float64 if typed.is_floating_point() else typed.dtype).contiguous()

    def evaluate(self, kind: str, attributes: Attributes, inputs: Sequence[Tensor], call: Call) -> Sequence[Tensor]:
        """Return the results of an operation."""
        form = form_of(kind)
        if form is not None:
            return form(attributes, inputs, call)
        results = self._numpy.evaluate(kind, attributes, [x.cpu().numpy() for x in inputs], call)
        return [torch.from_numpy(x).to(self._device) for x in results]

    def stored(self, x: Tensor, dtype: DType) -> Tensor:
        """Return `x` as memory returns it after it was stored as `dtype`."""
        return x.to(_STORED[dtype]).to(torch.float64)

    def signs(self, like: Tensor) -> Tensor:
        """Return +1 or -1 at random for each element."""
        bits = torch.randint(0, 2, like.shape, generator=self._random, device=self._device, dtype=torch.int8)
        return bits.to(torch.float64) * 2 - 1

    def where(self, condition: Tensor, x: Any, y: Any) -> Tensor:
        """Return `x` where the condition is true, else `y`."""
        return torch.where(condition, x, y)

    def padded(self, a: Pool, x: Tensor, fill: float) -> Tensor:
        """Return images with the padding that their pooling windows reach."""
        return padded(a, x, fill)

    def finite(self, x: Tensor) -> Tensor:
        """Return True for each element that is finite."""
        return torch.isfinite(x)

    def copy(self, data: Tensor) -> Tensor:
        """Return a copy of stored bytes."""
        return data.clone()

    def release(self) -> None:
        """Free the GPU memory that PyTorch caches."""
        torch.cuda.empty_cache()


def has_gpu() -> bool:
    """Return whether PyTorch was built for a GPU and finds one."""
    return bool(torch.cuda.is_available())


class _DeviceBytes:
    """Device memory that PyTorch can use without a copy."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (size_bytes,), "typestr": "|u1", "version": 2, "strides": None,
        }  # fmt: skip


def device_bytes(machine: Machine, region: Region) -> Tensor:
    """Return the bytes of a region without a copy; PyTorch's default stream and the launches wait for each other."""
    if region.space is Space.HOST or machine.arena_address is None:
        return torch.from_numpy(machine.memory_bytes(region.space, region.start, region.stop))
    return torch.as_tensor(_DeviceBytes(machine.arena_address + region.start, region.stop - region.start))
