"""The interfaces of measuring: a workbench for a GPU, a benchmark harness for one operation, whose operands it keeps on
the GPU, and a place for one of its sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from mbc.hardware.transfers import HostLink
from mbc.ir.types import Precision
from mbc.kernels.base import Request
from mbc.measure.clock import Times
from mbc.measure.need import Need
from mbc.measure.offers import Offer, Offered
from mbc.profile.model import Identity


class GpuFailed(Exception):
    """The GPU stopped working for this process: a kernel wrote where it must not, most likely."""


@dataclass(frozen=True)
class Attempt:
    """A candidate that was run once. `error` is negative where there was nothing to compare with. `hopeless`: it took
    longer than was asked for, and was not run in a graph. `skipped`: few rows told that it would take far too long, so
    that it was not run at all (`once_us` is what they make of it)."""

    offer: Offer
    once_us: float
    error: float
    refused: str = ""
    hopeless: bool = False
    skipped: bool = False


class Place(Protocol):
    """One request's operands and workspace."""

    def attempt(self, offer: Offer, hopeless_us: float, skip_us: float = math.inf) -> Attempt:
        """Run it once and check what it computes; in a graph too, unless it takes longer than `hopeless_us`. Where few
        rows say that it takes longer than `skip_us` it is not run.

        Raises GpuFailed, and `DoesNotFit` where its workspace does not fit.
        """
        ...

    def adds(self, attempt: Attempt) -> bool:
        """Whether it adds to its output when asked to, within the same workspace."""
        ...

    def time(self, attempt: Attempt, budget_us: float, accumulate: bool = False) -> Times:
        """About so long of replays, overwriting its output or adding to it. MBC077 where it cannot be captured."""
        ...


class Harness(Protocol):
    """The operands of one operation, for all its sizes."""

    def at(self, request: Request, offered: Sequence[Offer]) -> AbstractContextManager[Place]:
        """The place for one of the operation's sizes, with bytes for what is offered; `DoesNotFit` where its operands
        do not fit."""
        ...


class Workbench(Protocol):
    """What measuring needs of a GPU."""

    def identity(self) -> Identity: ...

    def warm(self, precision: Precision) -> None: ...

    def graph_gap_us(self, precision: Precision) -> float: ...

    def host_link(self, precision: Precision) -> HostLink:
        """Copies to the host and back, and what they cost kernels in that precision. `DoesNotFit` where memory for
        them is missing on either side."""
        ...

    def offers(self, request: Request, workspace_limit_bytes: int) -> Offered: ...

    def open(self, need: Need) -> AbstractContextManager[Harness]: ...
