"""What copies cost the kernels beside them, by the kind of each kernel."""

from __future__ import annotations

from collections.abc import Sequence

from mbc.device.spec import DeviceSpec
from mbc.device.transfers import Slowdown
from mbc.optimize.simulate import Contention
from mbc.plan.model import Buffer, Launch, Program, Stream

# A kernel that takes over so many times as long as moving its bytes does not wait for memory.
COMPUTING = 2.0
_ALONE = Slowdown()


def contention(program: Program, buffers: Sequence[Buffer], device: DeviceSpec) -> Contention | None:
    """How the launches of a program disturb each other on `device`; None where nothing is copied beside kernels."""
    if all(launch.stream is Stream.COMPUTE for launch in program.launches):
        return None
    link = device.host_link
    return Contention(
        tuple(
            _slowdown(launch, buffers, device) if launch.stream is Stream.COMPUTE else _ALONE
            for launch in program.launches
        ),
        link.to_host_gb_s / link.to_host_both_gb_s,
        link.to_device_gb_s / link.to_device_both_gb_s,
    )


def _slowdown(launch: Launch, buffers: Sequence[Buffer], device: DeviceSpec) -> Slowdown:
    """By its kind, told from its time and its bytes: what is slow for its bytes computes; of the rest, what fits in the
    L2 cache is taken to lie there, since what ran before has just written it."""
    touched = 0
    for access in launch.accesses:
        buffer = buffers[access.buffer]
        touched += buffer.size_bytes * access.rows.count // buffer.rows.count
    link = device.host_link
    if launch.work.time_us > device.launch_us + COMPUTING * touched / (device.copy_gb_s * 1e3):
        return link.computing
    return link.cached if touched <= device.l2_bytes else link.streaming
