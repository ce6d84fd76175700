"""Profiling requests: what a plan needs measured on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

from mbc.kernels.base import Request
from mbc.profile.model import Measurement

MOST_WORKSPACE_BYTES = 8 << 30  # of what is measured, where nobody says a limit


Measured = tuple[int, tuple[Measurement, ...]]  # rows, and what was measured of so many


@dataclass(frozen=True, slots=True)
class Decision:
    """What can decide a plan of what is not measured, by signature, those that take longest first; none where it is not
    worth measuring more. `step_us`: of the step if what is not measured takes as little as it may; `missing_share`: of
    its time what is not measured."""

    requests: tuple[str, ...]
    step_us: float
    missing_share: float


@dataclass(frozen=True, slots=True)
class Need:
    """One distinct operation: `requests[0]` runs it undivided, the others are its micro-batches, largest first.

    `weight_us` is the estimated time of all its occurrences in a step: what is worth most is measured first.
    `whole`: without it, all are micro-batches, of a request that is known. `larger`: what is known of larger sizes,
    largest first, which tells what is not worth trying at these.
    """

    requests: tuple[Request, ...]
    weight_us: float
    whole: bool = True
    larger: tuple[Measured, ...] = field(default=(), compare=False)

    @property
    def undivided(self) -> Request:
        return self.requests[0]
