"""Copies between a GPU and memory beside its own, the host's or another GPU's: how long they take, and how much they
slow down concurrent kernels.

A copy in one direction overlaps any kernel, any copy in the other direction and any of another link. All take a little
longer for it, and by how much was measured (`mbc.measure.host_copies`), or is estimated from the GPU's bus and NVLink.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import ClassVar, TypeVar

from mbc.hardware.streams import STREAM_FROM, STREAM_TO, Space, Stream

# A lane of PCIe 3.0 carries 8 GT/s in 130 bits for 128 of data, and every later generation twice as much as the one
# before (PCI-SIG, "PCI Express Base Specification", revisions 3.0 to 5.0).
_LANE_GB_S = 8 * 128 / 130 / 8
_LANE_GENERATION = 3
# What copies of pinned memory were seen to reach of that: 0.88 on one machine, mostly less.
_REACHED = 0.8
# Each direction while the other one is busy too, over alone: 49 of 55.3 GB/s on the one machine that was measured.
_KEPT = 0.88
_LATENCY_US = 10.0
# Of the datasheet's rate of NVLink, and each direction while the other one is busy too: 395 of 450 GB/s between two
# H100s, and 430 GB/s both ways together.
_NVLINK_REACHED = 0.88
_NVLINK_KEPT = 0.54
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
    """Time of a kernel while copies run, over its time alone: copies out of the GPU's memory, back to it, or both
    ways."""

    out: float = 1.0
    back: float = 1.0
    both: float = 1.0

    def scaled(self, times: float) -> Slowdown:
        """By copies that move so many times the bytes."""
        return Slowdown(*(1.0 + times * (getattr(self, f.name) - 1.0) for f in fields(self)))


class CopyLink:
    """What the links of a GPU have in common: fields for the rates of both directions, named after their streams
    (`to_host_gb_s`, `to_host_both_gb_s`), in 10^9 bytes a second, of copies by themselves and while the other direction
    is busy; `latency_us`, what a copy takes besides the time of its bytes; slow-downs of kernels of each class; and
    whether all that was `measured`."""

    __slots__ = ()
    space: ClassVar[Space]
    latency_us: float
    measured: bool

    @property
    def directions(self) -> tuple[Stream, Stream]:
        """The streams of copies out, and back."""
        return STREAM_TO[self.space], STREAM_FROM[self.space]

    def copy_us(self, size_bytes: int, direction: Stream, busy_both: bool = False) -> float:
        """Time of one copy of so many bytes in a step; `busy_both`: while the other direction is busy all the time."""
        return self.latency_us + size_bytes / (self.gb_s(direction, busy_both) * 1e3)

    def slowdown(self, kernels: KernelClass) -> Slowdown:
        """Of kernels of a class."""
        found: Slowdown = getattr(self, kernels.value)
        return found

    def gb_s(self, direction: Stream, busy_both: bool = False) -> float:
        """Rate of a direction in a step, alone or while the other one is busy."""
        if direction not in self.directions:
            raise ValueError("only the two copy streams of a link have a direction")
        rate: float = getattr(self, _rate_name(direction, busy_both))
        return IN_STEP * rate

    def slower_both(self, direction: Stream) -> float:
        """Time of a copy while the other direction is busy, over that alone."""
        alone: float = getattr(self, _rate_name(direction))
        return alone / getattr(self, _rate_name(direction, both=True))


@dataclass(frozen=True, slots=True)
class HostLink(CopyLink):
    """The link between one GPU and pinned host memory."""

    to_host_gb_s: float
    to_device_gb_s: float
    to_host_both_gb_s: float
    to_device_both_gb_s: float
    latency_us: float
    streaming: Slowdown
    cached: Slowdown
    computing: Slowdown
    measured: bool
    space: ClassVar[Space] = Space.HOST


@dataclass(frozen=True, slots=True)
class PeerLink(CopyLink):
    """The link between one GPU and the memory of another one of the machine. `beside_host`: time of its copies while
    copies to the host and back run, over that without; `host_beside`: that of copies to the host beside them."""

    to_peer_gb_s: float
    from_peer_gb_s: float
    to_peer_both_gb_s: float
    from_peer_both_gb_s: float
    latency_us: float
    streaming: Slowdown
    cached: Slowdown
    computing: Slowdown
    measured: bool
    beside_host: float = 1.0
    host_beside: float = 1.0
    space: ClassVar[Space] = Space.PEER


@dataclass(frozen=True, slots=True)
class Links:
    """The links of one GPU, by the direction of a copy."""

    host: HostLink
    peer: PeerLink

    def of(self, direction: Stream) -> HostLink | PeerLink:
        """The link that a copy stream belongs to."""
        return self.peer if direction in self.peer.directions else self.host

    def fastest(self, spaces: Iterable[Space]) -> tuple[Space, ...]:
        """Spaces by the rate of copies there, the fastest first."""
        return tuple(sorted(spaces, key=lambda space: -self.gb_s(STREAM_TO[space])))

    def gb_s(self, direction: Stream) -> float:
        """Rate of a direction in a step, alone."""
        return self.of(direction).gb_s(direction)

    def copy_us(self, size_bytes: int, direction: Stream, busy_both: bool = False) -> float:
        """As `CopyLink.copy_us`."""
        return self.of(direction).copy_us(size_bytes, direction, busy_both)


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


def estimated_peer_link(host: HostLink, nvlink_gb_s: float) -> PeerLink:
    """The link between two GPUs of one kind, joined by NVLink of that rate in each direction by the datasheet; 0: by
    the bus that `host` is on, too. Kernels lose by copies what they lose by those to the host, byte for byte."""
    alone_gb_s = _NVLINK_REACHED * nvlink_gb_s or min(host.to_host_gb_s, host.to_device_gb_s)
    both_gb_s = (_NVLINK_KEPT if nvlink_gb_s else _KEPT) * alone_gb_s
    times = alone_gb_s / host.to_host_gb_s
    slowdowns = (host.slowdown(kernels).scaled(times) for kernels in KernelClass)
    return PeerLink(alone_gb_s, alone_gb_s, both_gb_s, both_gb_s, _LATENCY_US, *slowdowns, measured=False)


def _rate_name(direction: Stream, both: bool = False) -> str:
    return f"{direction}_both_gb_s" if both else f"{direction}_gb_s"


_KINDS = tuple(kind.value for kind in KernelClass)
_BESIDE = ("beside_host", "host_beside")
AnyLink = TypeVar("AnyLink", HostLink, PeerLink)


def link_constants(link: HostLink | PeerLink) -> Mapping[str, float]:
    """The link as constants of a profile: `to_host_gb_s`, `copy_latency_us`, `streaming_both_slowdown` and so on; those
    of a peer link that do not name it by their direction begin with `peer_`."""
    names = _rate_names(type(link))
    found = {name: float(getattr(link, name)) for name in names} | {_latency_name(type(link)): link.latency_us}
    for kind in _KINDS:
        slowdown: Slowdown = getattr(link, kind)
        pairs = zip(_slowdown_names(type(link), kind), fields(Slowdown), strict=True)
        found |= {name: float(getattr(slowdown, f.name)) for name, f in pairs}
    if isinstance(link, PeerLink):
        found |= {_prefixed(PeerLink, name): float(getattr(link, name)) for name in _BESIDE}
    return found


def measured_link(constants: Mapping[str, float], stale: bool = False) -> HostLink | None:
    """The link that `link_constants` wrote; None where the profile knows none. `stale`: as an estimate."""
    return _measured(HostLink, constants, stale)


def measured_peer_link(constants: Mapping[str, float], stale: bool = False) -> PeerLink | None:
    """As `measured_link`, of the link to another GPU."""
    found = _measured(PeerLink, constants, stale)
    beside = {name: constants.get(_prefixed(PeerLink, name), 1.0) for name in _BESIDE}
    return None if found is None else replace(found, **beside)


def _measured(kind: type[AnyLink], constants: Mapping[str, float], stale: bool) -> AnyLink | None:
    wanted = (*_rate_names(kind), _latency_name(kind))
    if not all(name in constants for name in wanted):
        return None
    out, back, out_both, back_both, latency_us = (constants[name] for name in wanted)
    streaming, cached, computing = (
        Slowdown(*(constants.get(name, 1.0) for name in _slowdown_names(kind, kernels))) for kernels in _KINDS
    )
    return kind(out, back, out_both, back_both, latency_us, streaming, cached, computing, measured=not stale)


def _prefixed(kind: type[CopyLink], name: str) -> str:
    return name if kind is HostLink else f"peer_{name}"


def _rate_names(kind: type[CopyLink]) -> tuple[str, ...]:
    directions = STREAM_TO[kind.space], STREAM_FROM[kind.space]
    return tuple(_rate_name(direction, both) for both in (False, True) for direction in directions)


def _latency_name(kind: type[CopyLink]) -> str:
    return _prefixed(kind, "copy_latency_us")


def _slowdown_names(kind: type[CopyLink], kernels: str) -> tuple[str, str, str]:
    """By copies out, back, and both ways."""
    out, back = STREAM_TO[kind.space], STREAM_FROM[kind.space]
    return (
        f"{kernels}_{out}_slowdown", f"{kernels}_{back}_slowdown", _prefixed(kind, f"{kernels}_both_slowdown"),
    )  # fmt: skip
