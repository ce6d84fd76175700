"""Memory of another GPU, which a plan's copies go to and come from, taken once for the life of a module.

It is plain device memory in the primary context of that GPU, and reached directly (peer access). Nothing else of that
GPU is used or changed; other programs may run there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mbc.errors import MbcError
from mbc.runtime.nvml import used_bytes

_ELSEWHERE = "compile without memory.peers (--set memory.peers=0B)"
# Primary contexts of lenders, by address on the bus, for the life of the process: where one was released, the driver
# enables no access to the next one (580.159, "peer access is not supported between these two devices").
_contexts: dict[str, Any] = {}


class Lent:
    """`size_bytes` of the GPU called `lender`, from `address` on, as the context sees it that is current."""

    def __init__(self, allocation: Any, size_bytes: int, lender: str) -> None:
        self._allocation = allocation
        self.address, self.size_bytes, self.lender = int(allocation), size_bytes, lender

    def free(self) -> None:
        """Give it back; copies that use it must be over."""
        self._allocation.free()


def borrow(driver: Any, size_bytes: int) -> Lent | None:
    """So many bytes of the visible GPU with most memory to spare that the current context's reaches; None where there
    are none to take. MBC105 (no GPU lends), MBC106 (those that could have too little free memory)."""
    if not size_bytes:
        return None
    own = driver.Context.get_device()
    gpus = [driver.Device(number) for number in range(driver.Device.count())]
    others = [gpu for gpu in gpus if gpu.pci_bus_id() != own.pci_bus_id()]
    wanted = f"the plan offloads values to {size_bytes:,} bytes of another GPU's memory"
    if not others:
        raise MbcError(
            "MBC105", f"{wanted}, and {own.name()} is the only GPU that this process sees",
            f"let it see another one (CUDA_VISIBLE_DEVICES), or {_ELSEWHERE}",
        )  # fmt: skip
    reached = [gpu for gpu in others if own.can_access_peer(gpu)]
    if not reached:
        raise MbcError(
            "MBC105", f"{wanted}, and {own.name()} reaches none of {_named(others)} directly (no peer access)",
            f"run it on GPUs that are joined (`nvidia-smi topo -p2p r` shows which), or {_ELSEWHERE}",
        )  # fmt: skip
    most_bytes = 0
    for gpu in sorted(reached, key=_spare_bytes, reverse=True):
        found = _taken(driver, gpu, size_bytes)
        if isinstance(found, Lent):
            return found
        most_bytes = max(most_bytes, found)
    raise MbcError(
        "MBC106", f"{wanted}, and of {_named(reached)} none has so much: {most_bytes:,} are free",
        "end other programs that use them, or compile with memory.peers of less than that",
    )  # fmt: skip


def _spare_bytes(gpu: Any) -> int:
    """What is free by the driver's library, which makes no context to tell; all of it where it does not tell."""
    return int(gpu.total_memory()) - (used_bytes(gpu.pci_bus_id()) or 0)


def _taken(driver: Any, gpu: Any, size_bytes: int) -> Lent | int:
    """The memory, reachable from the current context, or the bytes that are free where these are fewer."""
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
        except driver.MemoryError:  # it is fragmented
            return int(driver.mem_get_info()[0])
    finally:
        driver.Context.pop()
    lent = Lent(allocation, size_bytes, gpu.name())
    try:
        driver.Context.enable_peer_access(context)
    except driver.Error as error:
        if "already" not in str(error):  # by another module of this process, or another framework
            lent.free()
            raise MbcError(
                "MBC105", f"{gpu.name()} lends no memory: {error}", f"see `mbc doctor`, or {_ELSEWHERE}"
            ) from error
    return lent


def _named(gpus: Sequence[Any]) -> str:
    return ", ".join(f"{gpu.name()} ({gpu.pci_bus_id()})" for gpu in gpus)
