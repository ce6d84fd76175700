"""Copies between a GPU and memory of the host or of another GPU: their time, and the slowdown of concurrent kernels.

A copy in one direction can overlap any kernel, any copy in the other direction, and any copy of another link. All take
a little longer then. The slowdown is measured (`mbc.measure.host_copies`), or estimated from the GPU's bus and NVLink.
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
# Share of that rate that copies of pinned memory reach: measured up to 0.88 on one machine, mostly less.
_REACHED = 0.8
# Rate of each direction while the other is busy, over that alone: 49 of 55.3 GB/s on the one measured machine.
_KEPT = 0.88
_LATENCY_US = 10.0
# Share of NVLink's datasheet rate that copies reach, and rate of each direction while the other is busy over that
# alone: 395 of 450 GB/s between two H100s, and 430 GB/s both ways together.
_NVLINK_REACHED = 0.88
_NVLINK_KEPT = 0.54
# Rate of copies in a step over their rate alone or beside one kernel that runs repeatedly: 47.5 of 55.3 GB/s, in each
# direction, for any size and any kernels (decision 020).
IN_STEP = 0.86


class KernelClass(StrEnum):
    """Limit of a kernel: device memory (STREAMING), the L2 cache with its operands (CACHED), or neither (COMPUTING)."""

    STREAMING = "streaming"
    CACHED = "cached"
    COMPUTING = "computing"


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Ratio of a kernel's time beside copies to its time alone.

    `out` and `back` are for copies out of the GPU's memory and back to it, `both` for both directions at once.
    """

    out: float = 1.0
    back: float = 1.0
    both: float = 1.0

    def scaled(self, times: float) -> Slowdown:
        """Return the slowdown by copies that move `times` times the bytes."""
        return Slowdown(*(1.0 + times * (getattr(self, f.name) - 1.0) for f in fields(self)))


class CopyLink:
    """Base class of the links of a GPU.

    Subclasses have the rates of both directions in 10^9 bytes a second, named after their streams: `to_host_gb_s` for
    copies alone, `to_host_both_gb_s` while the other direction is busy. `latency_us` is the time of a copy beyond the
    time of its bytes. Further fields are the slowdowns of each class of kernels, and whether all values were
    `measured`.
    """

    __slots__ = ()
    space: ClassVar[Space]
    latency_us: float
    measured: bool

    @property
    def directions(self) -> tuple[Stream, Stream]:
        """The streams of copies out, and back."""
        return STREAM_TO[self.space], STREAM_FROM[self.space]

    def copy_us(self, size_bytes: int, direction: Stream, busy_both: bool = False) -> float:
        """Return the time of one copy in a step, in microseconds.

        Args:
            size_bytes: Size of the copy.
            direction: Its stream.
            busy_both: The other direction is busy all the time.
        """
        return self.latency_us + size_bytes / (self.gb_s(direction, busy_both) * 1e3)

    def slowdown(self, kernels: KernelClass) -> Slowdown:
        """Return the slowdown of a class of kernels."""
        slowdown: Slowdown = getattr(self, kernels.value)
        return slowdown

    def gb_s(self, direction: Stream, busy_both: bool = False) -> float:
        """Return the rate of a direction in a step, alone or while the other direction is busy.

        Raises:
            ValueError: The stream is not one of this link's.
        """
        if direction not in self.directions:
            raise ValueError(f"{direction} is not a copy stream of the link to the {self.space}")
        rate: float = getattr(self, _rate_name(direction, busy_both))
        return IN_STEP * rate

    def slower_both(self, direction: Stream) -> float:
        """Return the ratio of a copy's time while the other direction is busy to its time alone."""
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
    """The link between one GPU and the memory of another GPU of the machine.

    `beside_host` is the slowdown of its copies while the host link copies in both directions. `host_beside` is the
    slowdown of the host link's copies while this link copies.
    """

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
        """Return the link of a copy stream."""
        return self.peer if direction in self.peer.directions else self.host

    def fastest(self, spaces: Iterable[Space]) -> tuple[Space, ...]:
        """Return the spaces in order of the rate of copies to them, fastest first."""
        return tuple(sorted(spaces, key=lambda space: -self.gb_s(STREAM_TO[space])))

    def gb_s(self, direction: Stream) -> float:
        """Return the rate of a direction in a step, alone."""
        return self.of(direction).gb_s(direction)

    def copy_us(self, size_bytes: int, direction: Stream, busy_both: bool = False) -> float:
        """Return the time of one copy in a step; see `CopyLink.copy_us`."""
        return self.of(direction).copy_us(size_bytes, direction, busy_both)


def estimated_link(generation: int, lanes: int) -> HostLink:
    """Return an estimate for a GPU on `lanes` lanes of PCIe of a generation.

    The slowdowns are those of an H200 while both directions are busy, divided evenly between the directions.
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
    """Return an estimate of the link between two GPUs of one kind.

    A byte copied to another GPU slows kernels down as much as a byte copied to the host.

    Args:
        host: The link to the host.
        nvlink_gb_s: Rate of NVLink in each direction, from the datasheet; 0 if only the bus of `host` connects the
            GPUs.
    """
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
    """Return the link as constants of a profile: `to_host_gb_s`, `copy_latency_us`, `streaming_both_slowdown`, ...

    Constants of a peer link that do not name it by their direction begin with `peer_`.
    """
    names = _rate_names(type(link))
    constants = {name: float(getattr(link, name)) for name in names} | {_latency_name(type(link)): link.latency_us}
    for kind in _KINDS:
        slowdown: Slowdown = getattr(link, kind)
        pairs = zip(_slowdown_names(type(link), kind), fields(Slowdown), strict=True)
        constants |= {name: float(getattr(slowdown, f.name)) for name, f in pairs}
    if isinstance(link, PeerLink):
        constants |= {_prefixed(PeerLink, name): float(getattr(link, name)) for name in _BESIDE}
    return constants


def measured_link(constants: Mapping[str, float], stale: bool = False) -> HostLink | None:
    """Return the link that `link_constants` wrote, None if the profile has none; `stale` marks it as an estimate."""
    return _measured(HostLink, constants, stale)


def measured_peer_link(constants: Mapping[str, float], stale: bool = False) -> PeerLink | None:
    """Return the link to another GPU that `link_constants` wrote, None if the profile has none."""
    link = _measured(PeerLink, constants, stale)
    beside = {name: constants.get(_prefixed(PeerLink, name), 1.0) for name in _BESIDE}
    return None if link is None else replace(link, **beside)


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
    """Return the names of the slowdowns by copies out, back, and both ways."""
    out, back = STREAM_TO[kind.space], STREAM_FROM[kind.space]
    return (
        f"{kernels}_{out}_slowdown", f"{kernels}_{back}_slowdown", _prefixed(kind, f"{kernels}_both_slowdown"),
    )  # fmt: skip
