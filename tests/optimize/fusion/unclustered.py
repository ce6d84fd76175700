"""GPUs and providers without kernels of clusters, so that small tensors are not normed at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec, find_spec
from mbc.kernels.base import Candidate, Request
from mbc.kernels.cuda import KERNELS
from mbc.kernels.providers import PROVIDERS
from tests.optimize.planned import Adapted


def _unclustered() -> DeviceSpec:
    spec, architecture = find_spec("h200"), "sm_80"
    assert spec.sheet is not None
    sheet = replace(spec.sheet, architecture=architecture)
    return replace(spec, name="a GPU without clusters", architecture=architecture, sheet=sheet)


# A GPU that does not exist: an H200 whose blocks form no clusters. It also lacks wgmma, so that convolutions with
# statistics in the epilogue are chosen by their estimates.
UNCLUSTERED = _unclustered()


@dataclass(frozen=True)
class WithoutClusters(Adapted):
    """A provider without kernels that need clusters, for GPUs with wgmma."""

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        clustered = {kernel.name for kernel in KERNELS.values() if kernel.needs is Instruction.CLUSTER}
        return (c for c in self.inner.candidates(request, device) if c.name not in clustered)


WITHOUT_CLUSTERS = tuple(WithoutClusters(provider) for provider in PROVIDERS)
