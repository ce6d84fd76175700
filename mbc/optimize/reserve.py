"""Device memory that a plan leaves to the context, libraries, modules and graphs (decision 001)."""

from __future__ import annotations

from mbc.device.spec import DeviceSpec
from mbc.ir.types import Precision
from mbc.optimize.order import Draft

# Of a GPU on which it was never measured.
UNMEASURED_BYTES = 650_000_000
# Graphs of so many launches are within what was measured, and what each further one takes.
USUAL_LAUNCHES = 2500
LAUNCH_BYTES = 16 << 10


def usual_bytes(device: DeviceSpec, precision: Precision) -> int:
    """What every plan leaves. Nothing in fp64, which runs on the CPU only."""
    return 0 if precision is Precision.FP64 else device.overhead_bytes or UNMEASURED_BYTES


def reserved_bytes(device: DeviceSpec, precision: Precision, draft: Draft) -> int:
    """What the plan of a draft leaves."""
    usual = usual_bytes(device, precision)
    launches = len(draft.train.launches) + len(draft.infer.launches)
    return usual + max(0, launches - USUAL_LAUNCHES) * LAUNCH_BYTES if usual else 0
