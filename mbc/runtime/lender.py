"""Memory of another GPU for a plan's copies, taken once for the life of a module.

It is ordinary device memory in the primary context of that GPU, and reached directly (peer access). Nothing else of
that GPU is used or changed; other programs may run there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mbc.errors import MbcError
from mbc.runtime.nvml import used_bytes

_ELSEWHERE = "compile without memory.peers (--set memory.peers=0B)"
# Primary contexts of lenders by bus address, kept for the life of the process: after a context was released, the driver
# refuses access to the next one (580.159, "peer access is not supported between these two devices").
_contexts: dict[str, Any] = {}


class Lent:
    """Memory of another GPU.

    Attributes:
        address: Address of the memory in the current context.
        size_bytes: Size of the memory.
        lender: Name of the GPU that lends it.
    """

    def __init__(self, allocation: Any, size_bytes: int, lender: str) -> None:
        """Wrap an allocation of PyCUDA."""
        self._allocation = allocation
        self.address, self.size_bytes, self.lender = int(allocation), size_bytes, lender

    def free(self) -> None:
        """Give the memory back; all copies that use it must have ended."""
        self._allocation.free()


def borrow(driver: Any, size_bytes: int) -> Lent | None:
    """Return memory of the GPU with most free memory that the current context's GPU reaches; None for 0 bytes.

    Args:
        driver: PyCUDA's driver interface.
        size_bytes: Bytes to borrow.

    Raises:
        MbcError: MBC105 (no GPU lends memory), MBC106 (those that could lend have too little free memory).
    """
    if not size_bytes:
        return None
    own = driver.Context.get_device()
    gpus = [driver.Device(number) for number in range(driver.Device.count())]
    others = [gpu for gpu in gpus if gpu.pci_bus_id() != own.pci_bus_id()]
    wanted = f"the plan offloads values to {size_bytes:,} bytes of another GPU's memory"
    if not others:
        raise MbcError(
            "MBC105", f"{wanted}, but {own.name()} is the only GPU that this process sees",
            f"make another GPU visible (CUDA_VISIBLE_DEVICES), or {_ELSEWHERE}",
        )  # fmt: skip
    reached = [gpu for gpu in others if own.can_access_peer(gpu)]
    if not reached:
        raise MbcError(
            "MBC105", f"{wanted}, but {own.name()} reaches none of {_named(others)} directly (no peer access)",
            f"run it on connected GPUs (`nvidia-smi topo -p2p r` shows which), or {_ELSEWHERE}",
        )  # fmt: skip
    most_bytes = 0
    for gpu in sorted(reached, key=_spare_bytes, reverse=True):
        lent = _taken(driver, gpu, size_bytes)
        if isinstance(lent, Lent):
            return lent
        most_bytes = max(most_bytes, lent)
    raise MbcError(
        "MBC106", f"{wanted}, but at most {most_bytes:,} are free on {_named(reached)}",
        "end other programs that use these GPUs, or compile with a smaller memory.peers",
    )  # fmt: skip


def _spare_bytes(gpu: Any) -> int:
    """Return a GPU's free bytes as NVML reports them, which needs no context; all bytes if NVML reports nothing."""
    return int(gpu.total_memory()) - (used_bytes(gpu.pci_bus_id()) or 0)


def _taken(driver: Any, gpu: Any, size_bytes: int) -> Lent | int:
    """Return memory that the current context can reach, or the number of free bytes if they are too few.

    Raises:
        MbcError: MBC105 if the driver does not enable peer access.
    """
    address = gpu.pci_bus_id()
    if address not in _contexts:
        _contexts[address] = gpu.retain_primary_context()
    context = _contexts[address]
    context.push()
    try:
        free_bytes = int(driver.mem_get_info()[0])
        if free_bytes < size_bytes:
            return free_bytes
        try:
            allocation = driver.mem_alloc(size_bytes)
        except driver.MemoryError:  # free memory is fragmented
            return int(driver.mem_get_info()[0])
    finally:
        driver.Context.pop()
    lent = Lent(allocation, size_bytes, gpu.name())
    try:
        driver.Context.enable_peer_access(context)
    except driver.Error as error:
        if "already" not in str(error):  # enabled by another module of this process, or by another framework
            lent.free()
            raise MbcError(
                "MBC105", f"{gpu.name()} lends no memory: {error}", f"see `mbc doctor`, or {_ELSEWHERE}"
            ) from error
    return lent


def _named(gpus: Sequence[Any]) -> str:
    return ", ".join(f"{gpu.name()} ({gpu.pci_bus_id()})" for gpu in gpus)
