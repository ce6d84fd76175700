"""Copies between host memory and several GPUs of one machine at a time: what of its link each of them keeps.

Ranks that share a mini-batch run alike: when one copies, all do, in the same direction or in both. So a plan for N of
them takes the rates that each of N reached while all copied. `mbc profile --gpu all` measures them
(`mbc.measure.host_fleet`).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from mbc.errors import MbcError
from mbc.hardware.target import HOST_SHARE
from mbc.hardware.transfers import HostLink
from mbc.units import show_size

# What all GPUs of a machine move together where nobody measured it: two moved 142 and 158 GB/s both ways, four 150
# out of their memories, 176 back, and 187 both ways, on two machines of two processors each.
HOST_GB_S = 150.0


@dataclass(frozen=True, slots=True)
class SharedRates:
    """Rates of the slowest of `gpus` GPUs (1: of one alone) of a machine in each direction, in 10^9 bytes a second:
    while all copy in that direction, and while all copy in both."""

    gpus: int
    to_host_gb_s: float
    to_device_gb_s: float
    to_host_both_gb_s: float
    to_device_both_gb_s: float


_RATES = tuple(f.name for f in fields(SharedRates) if f.name != "gpus")
_NAME = re.compile(rf"({'|'.join(_RATES)})_of_([1-9]\d*)_gpus")


def shared_link(link: HostLink, rates: Sequence[SharedRates], gpus: int) -> HostLink:
    """What each of `gpus` GPUs that copy at a time has of `link`.

    Between measured numbers of GPUs the bytes that all move together are interpolated linearly; more GPUs than were
    measured move as many together as the most that were. Where one GPU was measured in the same way, too, the rates
    are shares of what it reached. Without measurements all move HOST_GB_S, or what their links carry. No rate is above
    that alone, nor any of both directions above that of one.
    """
    if gpus < 2:
        return link
    reach = max((r.gpus for r in rates), default=1)
    found = {name: _rate(name, getattr(link, name), rates, gpus) for name in _RATES}
    for name in _RATES[:2]:
        both = name.replace("_gb_s", "_both_gb_s")
        found[both] = min(found[both], found[name])
    return replace(link, **found, measured=link.measured and gpus <= reach)


def _rate(name: str, alone: float, rates: Sequence[SharedRates], gpus: int) -> float:
    if all(r.gpus < 2 for r in rates):
        return min(alone, HOST_GB_S / gpus / (2 if name.endswith("_both_gb_s") else 1))
    found = {1: alone, **{r.gpus: float(getattr(r, name)) for r in rates}}
    together = {number: number * rate * alone / found[1] for number, rate in found.items()}
    known = sorted(together)
    above = bisect_left(known, gpus)
    if above == len(known):
        return min(alone, together[known[-1]] / gpus)
    low, high = known[above - 1], known[above]
    share = (gpus - low) / (high - low)
    return min(alone, ((1 - share) * together[low] + share * together[high]) / gpus)


def sharing_constants(rates: Sequence[SharedRates]) -> Mapping[str, float]:
    """The rates as constants of a profile: `to_host_gb_s_of_2_gpus` and so on."""
    return {f"{name}_of_{r.gpus}_gpus": float(getattr(r, name)) for r in rates for name in _RATES}


def measured_sharing(constants: Mapping[str, float]) -> tuple[SharedRates, ...]:
    """What `sharing_constants` wrote, by the number of GPUs; numbers of which a rate is missing are left out."""
    found: dict[int, dict[str, float]] = {}
    for name, value in constants.items():
        if match := _NAME.fullmatch(name):
            found.setdefault(int(match[2]), {})[match[1]] = value
    return tuple(SharedRates(gpus, **of) for gpus, of in sorted(found.items()) if len(of) == len(_RATES))


def check_pinned(sizes_bytes: Sequence[int], per_node: int, memory_bytes: int) -> None:
    """MBC360 where `per_node` ranks, one after another, pin more together than a machine of so much memory has.
    `sizes_bytes`: what each rank pins."""
    for first in range(0, len(sizes_bytes), per_node):
        together = sizes_bytes[first : first + per_node]
        if sum(together) > memory_bytes:
            share_bytes = int(memory_bytes * HOST_SHARE / len(together))
            raise MbcError(
                "MBC360",
                f"the plans of {len(together)} ranks on one machine pin {show_size(sum(together))} of host memory "
                f"together, {show_size(max(together))} the most of one, and this one has {show_size(memory_bytes)}",
                f"lower memory.host to {share_bytes // 10**6}MB, which lets all ranks have {HOST_SHARE:.0%} of the "
                "machine's; leave it out, which comes to the same; or raise memory.device",
            )
