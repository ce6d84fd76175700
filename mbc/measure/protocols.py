"""Interfaces of measuring: a workbench for a GPU, a harness for one operation, and a place for one of its sizes."""

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
    """The GPU stopped working for this process, most likely because a kernel wrote to an invalid address."""


@dataclass(frozen=True)
class Attempt:
    """A candidate that was run once.

    `error` is the distance from the reference, negative if nothing was compared. `hopeless`: the candidate took longer
    than the limit and was not run in a graph. `skipped`: a run on few rows showed that the candidate would take far too
    long, so that it was not run at all; `once_us` is then an estimate.
    """

    offer: Offer
    once_us: float
    error: float
    refused: str = ""
    hopeless: bool = False
    skipped: bool = False


class Place(Protocol):
    """Operands and workspace of one request."""

    def attempt(self, offer: Offer, hopeless_us: float, skip_us: float = math.inf) -> Attempt:
        """Run a candidate once, check its results, and time it in a graph.

        Args:
            offer: The candidate.
            hopeless_us: A candidate that takes longer is not run in a graph.
            skip_us: A candidate that would take longer, estimated from few rows, is not run at all.

        Raises:
            GpuFailed: The GPU failed.
            DoesNotFit: The workspace does not fit.
        """
        ...

    def adds(self, attempt: Attempt) -> bool:
        """Return whether the candidate adds to its output if asked to, within the same workspace."""
        ...

    def time(self, attempt: Attempt, budget_us: float, accumulate: bool = False) -> Times:
        """Measure the time of a candidate that overwrites its output or adds to it, by replays for about `budget_us`.

        Raises:
            MbcError: MBC077, the candidate cannot be captured.
        """
        ...


class Harness(Protocol):
    """The operands of one operation, for all its sizes."""

    def at(self, request: Request, offered: Sequence[Offer]) -> AbstractContextManager[Place]:
        """Return the place for one size of the operation, with a workspace for the offers.

        Raises:
            DoesNotFit: The operands do not fit.
        """
        ...


class Workbench(Protocol):
    """Interface to a GPU for measuring."""

    def identity(self) -> Identity:
        """Return the identity of the GPU, with the versions of driver and cuDNN."""
        ...

    def warm(self, precision: Precision) -> None:
        """Work until the clock rates are those of a GPU that has been busy for a while."""
        ...

    def graph_gap_us(self, precision: Precision) -> float:
        """Return the time from one node of a graph to the next if the nodes do almost nothing, in microseconds."""
        ...

    def host_link(self, precision: Precision) -> HostLink:
        """Measure copies to the host and back, and how much they slow down kernels in that precision.

        Raises:
            DoesNotFit: Memory for the copies is missing on either side.
        """
        ...

    def offers(self, request: Request, workspace_limit_bytes: int) -> Offered:
        """Return the candidates for `request` within the limit of workspace."""
        ...

    def open(self, need: Need) -> AbstractContextManager[Harness]:
        """Return the harness of one operation."""
        ...
