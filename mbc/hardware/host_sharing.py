"""Copies between host memory and several GPUs of one machine at a time, and the rate that each GPU keeps.

Ranks that share a mini-batch copy at the same time, in the same direction or in both. So a plan for N ranks uses the
rates that each of N GPUs reached while all copied. `mbc profile --gpu all` measures them (`mbc.measure.host_fleet`).
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

# Total rate of all GPUs of a machine if it was not measured: two moved 142 and 158 GB/s both ways, four 150 out of
# their memories, 176 back, and 187 both ways, on two machines of two processors each.
HOST_GB_S = 150.0


@dataclass(frozen=True, slots=True)
class SharedRates:
    """Rates of the slowest of `gpus` GPUs of a machine that copy at the same time, in 10^9 bytes a second.

    The first two rates apply while all GPUs copy in that direction, the `both` rates while all copy in both directions.
    With `gpus` = 1 one GPU copies alone.
    """

    gpus: int
    to_host_gb_s: float
    to_device_gb_s: float
    to_host_both_gb_s: float
    to_device_both_gb_s: float


_RATES = tuple(f.name for f in fields(SharedRates) if f.name != "gpus")
_NAME = re.compile(rf"({'|'.join(_RATES)})_of_([1-9]\d*)_gpus")


def shared_link(link: HostLink, rates: Sequence[SharedRates], gpus: int) -> HostLink:
    """Return the part of `link` that each of `gpus` GPUs has if all copy at a time.

    Between measured numbers of GPUs the total rate is interpolated linearly. More GPUs than were measured have the
    total rate of the largest measured number. If one GPU was measured in the same way too, the rates are shares of its
    rate. Without measurements the total rate is HOST_GB_S, or that of all links if it is lower. No rate exceeds that of
    one GPU alone, and no rate of both directions exceeds that of one direction.

    Args:
        link: The link of one GPU alone.
        rates: Measured rates of several GPUs.
        gpus: Number of GPUs that copy at a time.
    """
    if gpus < 2:
        return link
    reach = max((r.gpus for r in rates), default=1)
    shared = {name: _rate(name, getattr(link, name), rates, gpus) for name in _RATES}
    for name in _RATES[:2]:
        both = name.replace("_gb_s", "_both_gb_s")
        shared[both] = min(shared[both], shared[name])
    return replace(link, **shared, measured=link.measured and gpus <= reach)


def _rate(name: str, alone: float, rates: Sequence[SharedRates], gpus: int) -> float:
    if all(r.gpus < 2 for r in rates):
        return min(alone, HOST_GB_S / gpus / (2 if name.endswith("_both_gb_s") else 1))
    by_number = {1: alone, **{r.gpus: float(getattr(r, name)) for r in rates}}
    together = {number: number * rate * alone / by_number[1] for number, rate in by_number.items()}
    numbers = sorted(together)
    above = bisect_left(numbers, gpus)
    if above == len(numbers):
        return min(alone, together[numbers[-1]] / gpus)
    low, high = numbers[above - 1], numbers[above]
    share = (gpus - low) / (high - low)
    return min(alone, ((1 - share) * together[low] + share * together[high]) / gpus)


def sharing_constants(rates: Sequence[SharedRates]) -> Mapping[str, float]:
    """Return the rates as constants of a profile: `to_host_gb_s_of_2_gpus` and so on."""
    return {f"{name}_of_{r.gpus}_gpus": float(getattr(r, name)) for r in rates for name in _RATES}


def measured_sharing(constants: Mapping[str, float]) -> tuple[SharedRates, ...]:
    """Return the rates that `sharing_constants` wrote, by the number of GPUs; numbers that lack a rate are left out."""
    by_number: dict[int, dict[str, float]] = {}
    for name, value in constants.items():
        if match := _NAME.fullmatch(name):
            by_number.setdefault(int(match[2]), {})[match[1]] = value
    return tuple(SharedRates(gpus, **of) for gpus, of in sorted(by_number.items()) if len(of) == len(_RATES))


def check_pinned(sizes_bytes: Sequence[int], per_node: int, memory_bytes: int) -> None:
    """Raise MBC360 if the ranks of one machine pin more memory together than the machine has.

    Args:
        sizes_bytes: Bytes that each rank pins.
        per_node: Number of consecutive ranks on one machine.
        memory_bytes: Memory of a machine.
    """
    for first in range(0, len(sizes_bytes), per_node):
        together = sizes_bytes[first : first + per_node]
        if sum(together) > memory_bytes:
            share_bytes = int(memory_bytes * HOST_SHARE / len(together))
            raise MbcError(
                "MBC360",
                f"the plans of {len(together)} ranks on one machine pin {show_size(sum(together))} of host memory "
                f"together ({show_size(max(together))} for one rank), but the machine has {show_size(memory_bytes)}",
                f"lower memory.host to {share_bytes // 10**6}MB, so that all ranks together pin {HOST_SHARE:.0%} of "
                "the machine's memory; or leave it out, which has the same effect; or raise memory.device",
            )
