"""Times that nobody measured on this GPU: a similar GPU's, scaled, where its profile has them, else the model's."""

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
    """Admitted candidates of a request with their estimates, whatever was measured here. `optimism`: the share of the
    model's estimates that is taken, as if measured (`mbc.optimize.search.decisive_requests`); 0: they are estimates."""

    providers: tuple[Provider, ...]
    device: DeviceSpec
    profile: Profile | None
    other_sizes: OtherSizes | None
    rules: Rules
    precision: Precision
    optimism: float = 0.0

    def of(self, request: Request, remat_kernels: RematKernels) -> tuple[Candidate, ...]:
        similar = self.of_similar_gpu(request, remat_kernels)
        return with_leaner(request, similar, self.modelled(request, remat_kernels))

    def modelled(self, request: Request, remat_kernels: RematKernels) -> tuple[Candidate, ...]:
        """By the model alone."""
        named = [p for p in self.providers if self.rules.allow(p.name)]
        found = self.admitted((c for p in named for c in p.candidates(request, self.device)), remat_kernels)
        return sooner(found, self.optimism) if self.optimism else found

    def of_similar_gpu(self, request: Request, remat_kernels: RematKernels) -> tuple[Candidate, ...]:
        """By its profile alone. None where measuring was tried here: what failed does not come back from there."""
        similar = self.other_sizes.of_similar_gpu if self.other_sizes is not None else None
        if similar is None or self.failed(request):
            return ()
        found = similar.nearest(request, remat_kernels)
        return sooner(found, effort.SCALED_OPTIMISM) if self.optimism else found

    def later_on_similar_gpu(self, request: Request, remat_kernels: RematKernels) -> tuple[Candidate, ...]:
        """Kernels that were not measured here with the others, since they came later, by a similar GPU's profile."""
        if self.other_sizes is None:
            return ()
        found = self.other_sizes.later_on_similar_gpu(request, remat_kernels)
        return sooner(found, effort.SCALED_OPTIMISM) if self.optimism else found

    def admitted(self, candidates: Iterable[Candidate], remat_kernels: RematKernels) -> tuple[Candidate, ...]:
        """Those that the user's rules admit, and that give the same bits as what recomputes their outputs."""
        return self.rules.admitted(candidates, self.precision, remat_kernels)

    def was_tried(self, request: Request) -> bool:
        """Whether measuring was begun. Where no candidate is known then, all were refused, or it failed."""
        key = signature(request)
        return self.profile is not None and (key in self.profile.measurements or key in self.profile.extents)

    def failed(self, request: Request) -> bool:
        """Whether measuring was begun, and not left to the estimate."""
        return self.was_tried(request) and not self.is_left(request)

    def is_left(self, request: Request) -> bool:
        """Whether the profile leaves the request to its estimate (`Profile.left_to_estimate`)."""
        return self.profile is not None and self.profile.compares_estimate(request)


def with_leaner(
    request: Request, known: tuple[Candidate, ...], estimates: tuple[Candidate, ...]
) -> tuple[Candidate, ...]:
    """`known`, and of `estimates` those that need less workspace, none as faster; all of these where none is known.
    Where the known kernels of a fusion group need too much workspace, its operations can run one by one."""
    if not known or isinstance(request.attributes, Fused):
        return known or estimates
    least_bytes = min(c.workspace_bytes for c in known)
    slowest_us = max(c.time_us for c in known)
    smaller = (replace(c, time_us=max(c.time_us, slowest_us)) for c in estimates if c.workspace_bytes < least_bytes)
    return (*known, *smaller)


def sooner(candidates: tuple[Candidate, ...], share: float) -> tuple[Candidate, ...]:
    """Those that were not measured in this share of their time, as if that had been."""
    return tuple(c if c.measured else replace(c, time_us=share * c.time_us, measured=True) for c in candidates)
