"""Estimated times of a request: scaled from a similar GPU's profile if it has them, otherwise from a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Precision
from mbc.kernels.base import Candidate, Provider, Request
from mbc.ops.fused import Fused
from mbc.optimize import effort
from mbc.optimize.candidates.scaled_times import OtherSizes, RematKernels
from mbc.optimize.candidates.user_rules import Rules
from mbc.profile.model import Profile
from mbc.profile.signature import signature


@dataclass(frozen=True)
class Estimates:
    """Admitted candidates of a request with their estimates, whether or not they were measured here.

    Attributes:
        providers: Providers of kernels.
        device: The GPU.
        profile: Measurements on this GPU.
        other_sizes: Times scaled from other sizes of the profile, and the similar GPU's profile.
        rules: The user's rules.
        precision: Precision of the network.
        optimism: Share of the model's estimates that counts as a measured time
            (`mbc.optimize.search.decisive_requests`); 0 leaves them estimates.
    """

    providers: tuple[Provider, ...]
    device: DeviceSpec
    profile: Profile | None
    other_sizes: OtherSizes | None
    rules: Rules
    precision: Precision
    optimism: float = 0.0

    def of(self, request: Request, remat_kernels: RematKernels) -> tuple[Candidate, ...]:
        """Return all estimates of a request.

        They are a similar GPU's candidates, and modelled ones that need less workspace; modelled ones alone if there is
        no similar GPU.
        """
        similar = self.of_similar_gpu(request, remat_kernels)
        return with_leaner(request, similar, self.modelled(request, remat_kernels))

    def modelled(self, request: Request, remat_kernels: RematKernels) -> tuple[Candidate, ...]:
        """Return the admitted candidates with the times of the model alone.

        Candidates that need a measured time are among them only where estimates count as measured, to find out what to
        measure.
        """
        named = [p for p in self.providers if self.rules.allow(p.name)]
        every = (c for p in named for c in p.candidates(request, self.device))
        candidates = (c for c in every if self.optimism or not c.by_measurement)
        admitted = self.admitted(candidates, remat_kernels)
        return sooner(admitted, self.optimism) if self.optimism else admitted

    def of_similar_gpu(self, request: Request, remat_kernels: RematKernels) -> tuple[Candidate, ...]:
        """Return the admitted candidates of a similar GPU's profile, with scaled times.

        The result is empty if measuring failed on this GPU: a kernel that failed here must not return from there.
        """
        similar = self.other_sizes.of_similar_gpu if self.other_sizes is not None else None
        if similar is None or self.failed(request):
            return ()
        nearest = similar.nearest(request, remat_kernels)
        return sooner(nearest, effort.SCALED_OPTIMISM) if self.optimism else nearest

    def later_on_similar_gpu(self, request: Request, remat_kernels: RematKernels) -> tuple[Candidate, ...]:
        """Return kernels that a similar GPU's profile has, and that were added after the request was measured here."""
        if self.other_sizes is None:
            return ()
        later = self.other_sizes.later_on_similar_gpu(request, remat_kernels)
        return sooner(later, effort.SCALED_OPTIMISM) if self.optimism else later

    def admitted(self, candidates: Iterable[Candidate], remat_kernels: RematKernels) -> tuple[Candidate, ...]:
        """Return the candidates that the user's rules admit, and that give the same bits as `remat_kernels`."""
        return self.rules.admitted(candidates, self.precision, remat_kernels)

    def was_tried(self, request: Request) -> bool:
        """Return whether measuring the request was begun.

        If the profile has no candidate then, all were refused, or measuring failed.
        """
        key = signature(request)
        return self.profile is not None and (key in self.profile.measurements or key in self.profile.extents)

    def failed(self, request: Request) -> bool:
        """Return whether measuring the request was begun, and the request was not left to its estimate."""
        return self.was_tried(request) and not self.is_left(request)

    def is_left(self, request: Request) -> bool:
        """Return whether the profile leaves the request to its estimate (`Profile.left_to_estimate`)."""
        return self.profile is not None and self.profile.compares_estimate(request)


def with_leaner(
    request: Request, measured: tuple[Candidate, ...], estimates: tuple[Candidate, ...]
) -> tuple[Candidate, ...]:
    """Return measured candidates, and estimated ones that need less workspace than all of them.

    No estimate counts as faster than the slowest measured candidate. Without measured candidates all estimates are
    returned. For a fusion group that has measured candidates no estimate is added: where they need too much workspace,
    its operations can run one by one.
    """
    if not measured or isinstance(request.attributes, Fused):
        return measured or estimates
    least_bytes = min(c.workspace_bytes for c in measured)
    slowest_us = max(c.time_us for c in measured)
    smaller = (replace(c, time_us=max(c.time_us, slowest_us)) for c in estimates if c.workspace_bytes < least_bytes)
    return (*measured, *smaller)


def sooner(candidates: tuple[Candidate, ...], share: float) -> tuple[Candidate, ...]:
    """Return the candidates, in which `share` of each estimate counts as a measured time."""
    return tuple(c if c.measured else replace(c, time_us=share * c.time_us, measured=True) for c in candidates)
