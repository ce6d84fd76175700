"""The operands of one operation on a GPU, in several copies, and the addresses of a micro-batch's slices in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mbc.hardware.streams import ALIGNMENT_BYTES
from mbc.ir.types import Layout, TensorType, layout_matters
from mbc.kernels.base import Request
from mbc.measure.gpu import Gpu

MOST_COPIES = 8  # of the whole operands
MOST_SETS = 12  # of operands that calls use in turn
COPIES_SHARE = 0.3  # of the remaining memory

Fill = Callable[[int, Layout, int], None]  # (input, layout, address): writes the input's values at the address


def operand_types(request: Request) -> tuple[TensorType, ...]:
    """Return the types of the inputs and then of the outputs."""
    return (*request.inputs, *request.outputs)


@dataclass(frozen=True, slots=True)
class Pointers:
    """Addresses of one call's inputs, then its outputs."""

    addresses: tuple[int, ...]
    inputs: int

    @property
    def outputs(self) -> tuple[int, ...]:
        """Addresses of the outputs."""
        return self.addresses[self.inputs :]


class Buffers:
    """Copies of the operands of the undivided request: enough that successive calls do not find them in the L2 cache.

    A slice of fewer rows is a part of the operands, as in a plan, so that they are put on the GPU once for all sizes.
    """

    def __init__(
        self, gpu: Gpu, request: Request, fill: Fill, shared: Sequence[tuple[int, int]] = (), period: int = 1
    ) -> None:
        """Allocate the outputs; `ensure` allocates and fills the inputs.

        Args:
            gpu: The GPU.
            request: The undivided request.
            fill: Writes the values of an input.
            shared: (output, input) pairs that are one buffer.
            period: Number of rows after which values repeat.
        """
        self._gpu = gpu
        self._request = request
        self._fill = fill
        self._period = period
        self._types = operand_types(request)
        self._same = {len(request.inputs) + output: source for output, source in shared}
        self._set_bytes = sum(_padded(t.size_bytes) for i, t in enumerate(self._types) if i not in self._same)
        most = int(gpu.left_bytes * COPIES_SHARE) // self._set_bytes
        self.copies = max(1, min(self._enough(self._set_bytes), most, MOST_COPIES))
        self._outputs = [
            {i: self._take(t) for i, t in enumerate(self._types) if i >= len(request.inputs) and i not in self._same}
            for _ in range(self.copies)
        ]
        self._known: dict[tuple[int, Layout], list[int]] = {}

    def _take(self, tensor: TensorType) -> int:
        return self._gpu.take(tensor.size_bytes)

    def _enough(self, set_bytes: int) -> int:
        """Return the number of sets of `set_bytes` bytes that the L2 cache cannot hold."""
        return 1 if set_bytes > 2 * self._gpu.l2_bytes else math.ceil(2 * self._gpu.l2_bytes / set_bytes) + 1

    def ensure(self, layouts: Sequence[Layout]) -> None:
        """Put the inputs on the GPU in these layouts.

        Raises:
            DoesNotFit: The memory is too small.
        """
        for index in range(len(self._request.inputs)):
            self._copies(index, layouts[index])

    def _copies(self, index: int, layout: Layout) -> list[int]:
        tensor = self._types[index]
        if not layout_matters(tensor.shape):
            layout = Layout.CHANNELS_FIRST
        copies = self._known.get((index, layout))
        if copies is None:
            copies = [self._take(tensor) for _ in range(self.copies)]
            self._fill(index, layout, copies[0])
            for other in copies[1:]:
                self._gpu.copy(other, copies[0], tensor.size_bytes)
            self._known[(index, layout)] = copies
        return copies

    def sets(self, request: Request, layouts: Sequence[Layout]) -> list[Pointers]:
        """Return the addresses of a slice's operands, one set for each call in turn; the first set starts at row 0.

        Every address is aligned as a plan aligns whole buffers.
        """
        types = operand_types(request)
        rows = request.inputs[0].shape[0]
        total = self._request.inputs[0].shape[0]
        row_bytes = {i: t.size_bytes // rows for i, t in enumerate(types) if t != self._types[i]}
        alike = math.lcm(self._period, *(ALIGNMENT_BYTES // math.gcd(ALIGNMENT_BYTES, b) for b in row_bytes.values()))
        step = -(-rows // alike) * alike
        slots = (total - rows) // step + 1 if row_bytes else 1
        enough = min(MOST_SETS, self._enough(sum(_padded(t.size_bytes) for t in types)))
        sets: list[Pointers] = []
        for slot in range(slots):
            for copy in range(self.copies):
                if len(sets) == enough:
                    return sets
                sets.append(self._pointers(layouts, copy, {i: slot * step * b for i, b in row_bytes.items()}))
        return sets

    def _pointers(self, layouts: Sequence[Layout], copy: int, skipped: dict[int, int]) -> Pointers:
        inputs = [self._copies(i, layouts[i])[copy] for i in range(len(self._request.inputs))]
        addresses = list(inputs)
        for index in range(len(inputs), len(self._types)):
            source = self._same.get(index)
            addresses.append(self._outputs[copy][index] if source is None else inputs[source])
        moved = tuple(address + skipped.get(i, 0) for i, address in enumerate(addresses))
        return Pointers(moved, len(inputs))


def _padded(size_bytes: int) -> int:
    return max(1, -(-size_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
