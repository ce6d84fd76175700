"""Overhead: device memory that a plan reserves for the context, libraries, modules and graphs (decision 001)."""

from __future__ import annotations

from mbc.hardware.spec import DeviceSpec
from mbc.hardware.streams import Space
from mbc.ir.types import Precision
from mbc.optimize.schedule.emit_launches import Draft

# Overhead on a GPU where it was never measured.
UNMEASURED_BYTES = 650_000_000
# Launches of a plan that the measured overhead includes, and bytes of each additional launch.
USUAL_LAUNCHES = 2000
LAUNCH_BYTES = 16 << 10
# Host memory whose page tables the measured overhead includes. More host memory takes 8 bytes for each 4 KiB.
USUAL_HOST_BYTES = 4 * 10**9
HOST_BYTES_MAPPED = 512  # bytes of host memory that one byte on the device maps


def usual_bytes(device: DeviceSpec, precision: Precision) -> int:
    """Return the bytes that every plan reserves; 0 in fp64, which runs on the CPU only."""
    if not precision.runs_on_gpus:
        return 0
    return (device.overhead_bytes or UNMEASURED_BYTES) + device.communicator_bytes


def reserved_bytes(device: DeviceSpec, precision: Precision, draft: Draft, more_launches: int = 0) -> int:
    """Return the bytes outside the arena that a plan with this draft reserves, for example for the CUDA context.

    Args:
        device: The GPU.
        precision: Precision of the step.
        draft: The plan without addresses.
        more_launches: Launches that the draft does not have yet.
    """
    usual = usual_bytes(device, precision)
    if not usual:
        return 0
    launches = len(draft.train.launches) + len(draft.infer.launches) + more_launches
    host_bytes = sum(buffer.size_bytes for buffer in draft.buffers if buffer.space is Space.HOST)
    return usual + max(0, launches - USUAL_LAUNCHES) * LAUNCH_BYTES + tables_bytes(host_bytes)


def tables_bytes(host_bytes: int) -> int:
    """Return the bytes of page tables for so much host memory that the measured overhead does not include."""
    return max(0, host_bytes - USUAL_HOST_BYTES) // HOST_BYTES_MAPPED
