"""Copies between a GPU and its host's memory: how long they take, and how much they slow down concurrent kernels.

A copy in one direction overlaps any kernel and any copy in the other direction. Both take a little longer for it, and
by how much was measured (`mbc.measure.host_copies`), or is estimated from the generation of the GPU's bus.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum

from mbc.plan.model import Stream

# A lane of PCIe 3.0 carries 8 GT/s in 130 bits for 128 of data, and every later generation twice as much as the one
# before (PCI-SIG, "PCI Express Base Specification", revisions 3.0 to 5.0).
_LANE_GB_S = 8 * 128 / 130 / 8
_LANE_GENERATION = 3
# What copies of pinned memory were seen to reach of that: 0.88 on one machine, mostly less.
_REACHED = 0.8
# Each direction while the other one is busy too, over alone: 49 of 55.3 GB/s on the one machine that was measured.
_KEPT = 0.88
_LATENCY_US = 10.0
# What copies reach in a step of what they reach by themselves or concurrently with one kernel that is run again and
# again: 47.5 of 55.3 GB/s, in each direction, of any size and whatever the kernels are (decision 020).
IN_STEP = 0.86


class KernelClass(StrEnum):
    """What a kernel waits for: device memory (STREAMING), the L2 cache, in which its operands lie (CACHED), or neither
    (COMPUTING)."""

    STREAMING = "streaming"
    CACHED = "cached"
    COMPUTING = "computing"


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Time of a kernel while copies run, over its time alone: copies to the host, to the device, or both ways."""

    to_host: float = 1.0
    to_device: float = 1.0
    both: float = 1.0


@dataclass(frozen=True, slots=True)
class HostLink:
    """The link between one GPU and pinned host memory. Rates are in 10^9 bytes a second, of copies by themselves;
    `to_host_both_gb_s` and `to_device_both_gb_s` those of each direction while both are busy. `latency_us` is what a
    copy takes besides the time of its bytes.
    `streaming`, `cached`, `computing`: of kernels of each class.
    """

    to_host_gb_s: float
    to_device_gb_s: float
    to_host_both_gb_s: float
    to_device_both_gb_s: float
    latency_us: float
    streaming: Slowdown
    cached: Slowdown
    computing: Slowdown
    measured: bool

    def copy_us(self, size_bytes: int, direction: Stream, busy_both: bool = False) -> float:
        """Time of one copy of so many bytes in a step; `busy_both`: while the other direction is busy all the time."""
        return self.latency_us + size_bytes / (self.gb_s(direction, busy_both) * 1e3)

    def slowdown(self, kernels: KernelClass) -> Slowdown:
        """Of kernels of a class."""
        found: Slowdown = getattr(self, kernels.value)
        return found

    def gb_s(self, direction: Stream, busy_both: bool = False) -> float:
        """Rate of a direction in a step, alone or while the other one is busy."""
        if direction is Stream.TO_HOST:
            return IN_STEP * (self.to_host_both_gb_s if busy_both else self.to_host_gb_s)
        if direction is Stream.TO_DEVICE:
            return IN_STEP * (self.to_device_both_gb_s if busy_both else self.to_device_gb_s)
        raise ValueError("only the two copy streams have a direction")


def estimated_link(generation: int, lanes: int) -> HostLink:
    """What a GPU on so many lanes of PCIe of a generation should reach.

    The slow-downs are those of an H200 with both directions busy, shared out evenly between the two.
    """
    alone_gb_s = _REACHED * _LANE_GB_S * 2.0 ** (generation - _LANE_GENERATION) * lanes
    return HostLink(
        alone_gb_s,
        alone_gb_s,
        _KEPT * alone_gb_s,
        _KEPT * alone_gb_s,
        _LATENCY_US,
        Slowdown(1.012, 1.012, 1.024),
        Slowdown(1.045, 1.045, 1.09),
        Slowdown(1.008, 1.008, 1.016),
        measured=False,
    )


_RATES = ("to_host_gb_s", "to_device_gb_s", "to_host_both_gb_s", "to_device_both_gb_s")
_KINDS = tuple(kind.value for kind in KernelClass)


def link_constants(link: HostLink) -> Mapping[str, float]:
    """The link as constants of a profile: `to_host_gb_s`, `copy_latency_us`, `streaming_both_slowdown` and so on."""
    found = {name: float(getattr(link, name)) for name in _RATES} | {"copy_latency_us": link.latency_us}
    for kind in _KINDS:
        slowdown: Slowdown = getattr(link, kind)
        found |= {_slowdown_name(kind, f.name): float(getattr(slowdown, f.name)) for f in fields(Slowdown)}
    return found


def measured_link(constants: Mapping[str, float], stale: bool = False) -> HostLink | None:
    """The link that `link_constants` wrote; None where the profile knows none. `stale`: as an estimate."""
    if not all(name in constants for name in (*_RATES, "copy_latency_us")):
        return None

    def slowdown(kind: str) -> Slowdown:
        return Slowdown(*(constants.get(_slowdown_name(kind, f.name), 1.0) for f in fields(Slowdown)))

    to_host, to_device, to_host_both, to_device_both = (constants[name] for name in _RATES)
    return HostLink(
        to_host,
        to_device,
        to_host_both,
        to_device_both,
        constants["copy_latency_us"],
        slowdown("streaming"),
        slowdown("cached"),
        slowdown("computing"),
        measured=not stale,
    )


def _slowdown_name(kind: str, direction: str) -> str:
    return f"{kind}_{direction}_slowdown"
