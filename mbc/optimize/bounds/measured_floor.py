"""The measured floor of a network: the least time of a step on a GPU whose kernels were measured.

Benchmarks compare steps with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mbc.hardware.spec import DeviceSpec
from mbc.ir.graph import TrainingGraph
from mbc.kernels.providers import PROVIDERS
from mbc.ops import KINDS
from mbc.ops.fused import gives_product, names_of
from mbc.optimize.bounds.io_lower_bound import fewest_bytes
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.bitwise_remat_match import with_bitwise_remat
from mbc.optimize.fusion.select_groups import Fusion
from mbc.profile.model import Profile, calibrated

BANDWIDTH_SHARE = 0.9  # share of the copy bandwidth that a good kernel reaches


@dataclass(frozen=True, slots=True)
class Floor:
    """The fastest measured kernels of all convolutions and GEMMs, plus the fewest bytes of everything else.

    Kernels are undivided and in any layout. Bytes move at `BANDWIDTH_SHARE` of the copy bandwidth. A GEMM that was
    measured fused with the reductions that read it counts as the time of their launch, less the time of the bytes that
    the reductions move. The difference may be below zero, since these bytes include the GEMM's result.

    Attributes:
        products_us: Time of the convolutions and GEMMs.
        products: Number of convolutions and GEMMs.
        estimated_us: The part of `products_us` that no profile has measured.
        estimated: Number of convolutions and GEMMs without a measurement.
        other_bytes: The fewest bytes that everything else moves.
        other_us: Time of these bytes.
    """

    products_us: float
    products: int
    estimated_us: float
    estimated: int
    other_bytes: int
    other_us: float

    @property
    def total_us(self) -> float:
        """Time of the step."""
        return self.products_us + self.other_us


def step_floor(fusion: Fusion) -> Floor:
    """Return the measured floor of the training step of a graph with these fusion groups.

    A kernel that fuses a GEMM with part of the rest, and that mbc does not have, may be faster.

    Raises:
        MbcError: MBC200 or MBC202, if no kernel can run a GEMM.
    """
    table = fusion.table
    products_us = estimated_us = 0.0
    products = estimated = 0
    bytes_per_us = BANDWIDTH_SHARE * table.device.copy_gb_s * 1e3
    within_us = _within_us(fusion, bytes_per_us)
    every = table.with_recomputed({})  # the fastest kernels, without the restriction to bitwise matches
    for operation in table.graph.train:
        if KINDS[operation.kind].flops is None:
            continue
        best = min(every.candidates(operation, table.whole), key=lambda candidate: candidate.time_us)
        products += 1
        products_us += min(best.time_us, within_us.get(operation.name, best.time_us))
        if not best.measured:
            estimated += 1
            estimated_us += best.time_us
    other_bytes = fewest_bytes(table.graph)
    other_us = other_bytes / bytes_per_us
    return Floor(products_us, products, estimated_us, estimated, other_bytes, other_us)


def _within_us(fusion: Fusion, bytes_per_us: float) -> dict[str, float]:
    """Return the time of GEMMs measured fused with reductions, beyond that of the reductions' bytes, by name."""
    table = fusion.table
    by_name = {operation.name: operation for operation in table.graph.train}
    beyond_by_name: dict[str, float] = {}
    measured = (group for group in fusion.groups[0] if group.measured)
    for launch, replaces in ((launch, group.replaces) for group in measured for launch in group.launches):
        products = [o for o in map(by_name.__getitem__, names_of(launch)) if KINDS[o.kind].flops is not None]
        request = table.request(launch, table.whole)
        results = [type_ for o in products for type_ in table.request(o, table.whole).outputs]
        rest = (*request.inputs[2 * len(products) :], *request.outputs[gives_product(launch.attributes) :])
        moved_us = sum(type_.size_bytes for type_ in (*rest, *results)) / bytes_per_us
        beyond_us = min(candidate.time_us for candidate in table.offered(launch)) - moved_us
        for name in (o.name for o in products if o.name in replaces):
            beyond_by_name[name] = min(beyond_us, beyond_by_name.get(name, beyond_us))
    return beyond_by_name


def graph_floor(graph: TrainingGraph, device: DeviceSpec, profile: Profile | None) -> Floor:
    """Return the measured floor of a graph, with every kernel and every launch that a profile has measured."""
    table = CandidateTable(graph, calibrated(device, profile), PROVIDERS, profile)
    return step_floor(with_bitwise_remat(Fusion.of(table)))
