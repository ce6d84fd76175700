"""The memory-saving techniques that a trial of the search may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mbc.hardware.streams import Space
from mbc.optimize.schedule.depth_first_groups import Division


@dataclass(frozen=True, slots=True)
class AllowedTechniques:
    """The memory-saving techniques that may be used.

    Attributes:
        recompute: Whether values may be recomputed.
        offload: Largest share of the excess bytes that is offloaded.
        host_bytes: Host memory that offloads may use.
        split: Whether large values may exist in micro-batches only.
        division: The division into micro-batches in this trial.
        states_bytes: Bytes of the optimizer's states that are outside the arena between steps.
        lead: Time that such states are in the arena before their update, and after, in times of their copy.
        peer_bytes: Memory of another GPU that offloads may use.
        slow_first: Whether a copy uses the slower link where both links hide it.
        convert_back: Whether values that are needed in two layouts are kept in one of them.
        stall: Whether kernels may wait for an offloaded value.
    """

    recompute: bool
    offload: float
    host_bytes: int
    split: bool = False
    division: Division | None = None
    states_bytes: int = 0
    lead: float = 0.0
    peer_bytes: int = 0
    slow_first: bool = False
    convert_back: bool = False
    stall: bool = True

    @property
    def room_bytes(self) -> Mapping[Space, int]:
        """Bytes that may be outside the arena, by space. If no peer lends memory, the host is the only space."""
        spaces = {Space.HOST: self.host_bytes, Space.PEER: self.peer_bytes}
        return {space: size_bytes for space, size_bytes in spaces.items() if space is Space.HOST or size_bytes}

    @property
    def outside_bytes(self) -> int:
        """Bytes that may be outside the arena in total."""
        return sum(self.room_bytes.values()) if self.offload > 0 else 0

    def less(self, taken_bytes: Mapping[Space, int]) -> AllowedTechniques:
        """Return the techniques with `taken_bytes` less of each space."""
        host_bytes, peer_bytes = (taken_bytes.get(space, 0) for space in (Space.HOST, Space.PEER))
        return replace(self, host_bytes=self.host_bytes - host_bytes, peer_bytes=self.peer_bytes - peer_bytes)
