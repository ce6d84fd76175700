"""Profiling requests: the measurements that a plan needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from mbc.kernels.base import Request
from mbc.profile.model import Measurement

MOST_WORKSPACE_BYTES = 8 << 30  # default limit of a candidate's workspace


Measured = tuple[int, tuple[Measurement, ...]]  # number of rows, and the measurements at that size


@dataclass(frozen=True, slots=True)
class Decision:
    """The unmeasured requests that can decide a plan, by signature, in order of decreasing time.

    There are none if more measurements would not pay. `step_us` is the time of the step if each unmeasured request
    takes its least possible time. `missing_share` is the share of unmeasured requests in that time.
    """

    requests: tuple[str, ...]
    step_us: float
    missing_share: float


@dataclass(frozen=True, slots=True)
class Need:
    """One distinct operation: `requests[0]` runs it undivided, the others are its micro-batches, largest first.

    `weight_us` is the estimated time of all its occurrences in a step; the heaviest operations are measured first.
    `whole`: if false, all requests are micro-batches of a request that is already measured. `larger` are measurements
    of larger sizes, largest first, which rule out candidates at these sizes.
    """

    requests: tuple[Request, ...]
    weight_us: float
    whole: bool = True
    larger: tuple[Measured, ...] = field(default=(), compare=False)

    @property
    def undivided(self) -> Request:
        """The request that runs the operation undivided."""
        return self.requests[0]
