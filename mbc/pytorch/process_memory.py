"""The memory of a GPU that this process takes, and what `memory=` of `mbc.module` leaves to a plan.

`memory=` limits all that nvidia-smi shows for the process. When a plan is made, PyTorch's context and tensors exist
already; its optimizer and the tensors of its loss do not, so that bytes are reserved for them. After the first steps
the memory that the process takes is measured.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mbc.errors import BudgetError, MbcError
from mbc.hardware.target import current_gpu, find_device
from mbc.interchange.steps import Imported
from mbc.ir.types import Precision
from mbc.optimize.search.overhead import usual_bytes
from mbc.options import Options
from mbc.runtime.arguments import size_of
from mbc.runtime.usage import own_bytes
from mbc.units import show_enough, show_given, show_size

torch: Any = importlib.import_module("torch")
# PyTorch's allocator takes this much at once for tensors of 1 to 10 MB.
SEGMENT_BYTES = 20 << 20
OPTIMIZER_BYTES = 8  # two moments in float32 for each trained parameter
# Copies of inputs and outputs in float32 that a loop has at a time: mini-batches, outputs, what the loss computes of
# them, and gradients.
COPIES = 6
Meter = Callable[[], "Taken"]


@dataclass(frozen=True, slots=True)
class Taken:
    """Memory of a GPU that this process takes.

    Attributes:
        reserved_bytes: Memory that PyTorch's allocator holds. A plan's arena is part of it.
        outside_bytes: All other memory: context, libraries and code. None if the driver does not report it.
    """

    reserved_bytes: int
    outside_bytes: int | None


def meter_of(device: str) -> Meter | None:
    """Return a function that measures this process's memory; None for a plan that runs on the CPU."""
    gpu = None if device == "cpu" else current_gpu()
    return None if gpu is None else partial(_measured, gpu.bus_id)


def _measured(bus_id: str) -> Taken:
    reserved = torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0
    own = own_bytes(bus_id)
    return Taken(reserved, None if own is None else max(0, own - reserved))


@dataclass(frozen=True, slots=True)
class Limit:
    """The memory that a process may take.

    Attributes:
        limit_bytes: Bytes of the GPU's memory.
        reserve_bytes: Bytes for the optimizer, the loss and mini-batches; None for an estimate.
        overhead_bytes: Bytes that a plan reserves for context, libraries and code.
        measure: Measures what the process takes.
    """

    limit_bytes: int
    reserve_bytes: int | None
    overhead_bytes: int
    measure: Meter

    def beside_bytes(self, model: Any, network: Imported) -> int:
        """Return the bytes of the limit that a plan of the model, with its overhead, must leave.

        Parameters and buffers on the GPU are not among them, because they move into the plan's memory.
        """
        now = self.measure()
        tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
        held = max(0, now.reserved_bytes - sum(tensors.values()))
        # Context and libraries that exist already are part of a plan's overhead.
        outside = max(0, (now.outside_bytes or 0) - self.overhead_bytes)
        return held + outside + (_estimate(model, network) if self.reserve_bytes is None else self.reserve_bytes)

    def excess_bytes(self, overhead_bytes: int) -> int:
        """Return by how many bytes the process exceeds the limit now.

        Args:
            overhead_bytes: The plan's overhead, which counts if the driver does not report memory of processes.
        """
        now = self.measure()
        return (
            now.reserved_bytes + (overhead_bytes if now.outside_bytes is None else now.outside_bytes) - self.limit_bytes
        )

    def explained(self, error: BudgetError, beside_bytes: int) -> MbcError:
        """Return the error of a plan that does not fit, in terms of the limit."""
        needed = show_enough(error.needed_bytes + beside_bytes)
        wanted = f"at least memory='{needed}'" if error.is_planned else f"more than memory='{needed}', a lower bound"
        return replace(
            error,
            message=f"{show_size(beside_bytes)} of memory={show_given(self.limit_bytes)} are in use or reserved for"
            f" optimizer and loss, and no plan fits into the rest: {error.message}",
            remedy=f"pass {wanted}; reserve= sets what is reserved",
        )  # fmt: skip


@dataclass(slots=True)
class MemoryChecks:
    """The checks of a planned model's memory: after 2, 4, 8, … backward passes.

    Later checks see an optimizer that makes its first step late.

    Attributes:
        passes: Backward passes until now.
        checked: Those at the last check.
        replanned: Whether the model was planned again.
    """

    passes: int = 0
    checked: int = 1
    replanned: bool = False

    @property
    def is_due(self) -> bool:
        """True if memory is to be checked now."""
        return self.passes >= 2 * self.checked


def limit_of(memory: str | int, reserve: str | int | None, device: str, precision: str) -> Limit | None:
    """Return the limit that `memory=` sets; None for a plan that runs on the CPU.

    Raises:
        MbcError: MBC167 for a size that is none.
    """
    reserve_bytes = None if reserve is None else size_of("reserve", reserve)
    meter = meter_of(device)
    if meter is None:
        return None
    overhead_bytes = usual_bytes(find_device("auto"), Precision(precision))
    size_bytes = 0 if memory == "auto" else size_of("memory", memory)
    if memory == "auto":
        now, gpu = meter(), current_gpu()
        free_bytes = 0 if gpu is None else gpu.free_bytes
        if torch.cuda.is_initialized():  # CUDA cannot allocate all that nvidia-smi counts as free
            free_bytes = torch.cuda.mem_get_info()[0]
        size_bytes = now.reserved_bytes + (now.outside_bytes or 0) + free_bytes
    return Limit(size_bytes, reserve_bytes, overhead_bytes, meter)


def _estimate(model: Any, network: Imported) -> int:
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    shapes: Sequence[tuple[int, ...]] = (
        *(shape for _, shape in network.inputs),
        *(network.shapes[value] for value in network.outputs),
    )
    return OPTIMIZER_BYTES * trained + COPIES * (4 * sum(map(math.prod, shapes)) + SEGMENT_BYTES)


def with_memory(options: Options, size_bytes: int) -> Options:
    """Return options with another budget."""
    return replace(options, settings=(*options.settings, ("memory.device", f"{size_bytes}B")))


def free_unused() -> None:
    """Give back memory that PyTorch keeps but does not use."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
