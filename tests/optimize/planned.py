"""Tables, drafts and plans of small networks, for tests of the search's decisions."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from mbc.hardware.spec import DeviceSpec, find_spec
from mbc.ir.graph import TrainingGraph
from mbc.kernels.base import Acceptance, Arguments, Call, Candidate, Provider, Request
from mbc.kernels.providers import PROVIDERS
from mbc.ops.fused import Fused, gives_product
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.placement.assign_addresses import assign_addresses
from mbc.optimize.schedule.emit_launches import Draft, emit_launches
from mbc.optimize.schedule.synchronise import synchronise
from mbc.optimize.search.search import Limits, search
from mbc.optimize.search.solution import Problem
from mbc.optimize.selection.select import choose
from mbc.optimize.selection.selector import Selector
from mbc.options import UNLIMITED_BYTES
from mbc.plan.model import Plan
from mbc.plan.verify import verify_plan
from mbc.profile.model import calibrated
from mbc.profile.signature import rows_of
from mbc.runtime.launch_order import Transfers
from mbc.runtime.module import Module
from tests.graphs import network_source, training_graph

H200 = find_spec("h200")
FASTER = ((3328, 0.75), (9984, 0.5))  # bytes of workspace, and the share of the time with them
NETWORKS = {name: network_source(name) for name in ("residual", "synchronised", "dense")}


class NoSizes(Any):
    """An invented profile, which has measured the requested sizes and no others."""

    scaling = None
    similar = None
    measurements: Mapping[str, object] = {}
    extents: Mapping[str, object] = {}

    def __new__(cls, *_: Any, **__: Any) -> Self:
        return object.__new__(cls)  # that of Any takes no arguments for the fields of subclasses

    def candidates(self, request: Request) -> Iterable[Candidate]:
        return ()

    def family(self, request: Request) -> Mapping[int, tuple[Candidate, ...]]:
        candidates = tuple(self.candidates(request))
        return {rows_of(request): candidates} if candidates else {}

    def compares_estimate(self, request: Request) -> bool:
        return False


@dataclass(frozen=True)
class Adapted:
    """A provider that passes calls on to `inner`; subclasses change its candidates."""

    inner: Provider

    @property
    def name(self) -> str:
        return self.inner.name

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        return self.inner.candidates(request, device)

    def arguments(self, call: Call, first_row: int) -> Arguments:
        return self.inner.arguments(call, first_row)

    def accepts(self, call: Call, device: DeviceSpec) -> Acceptance:
        return self.inner.accepts(call, device)


@dataclass(frozen=True)
class Without(Adapted):
    """A provider that has no kernels for groups."""

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        return () if isinstance(request.attributes, Fused) else self.inner.candidates(request, device)


@dataclass(frozen=True)
class Favouring(Adapted):
    """A provider whose kernels for groups take half the time, so that they are selected for small tensors, too."""

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        part = 0.5 if isinstance(request.attributes, Fused) else 1.0
        return (replace(c, time_us=part * c.time_us) for c in self.inner.candidates(request, device))


@dataclass(frozen=True)
class Roomy(Adapted):
    """A provider whose kernels are faster with workspace."""

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        for candidate in self.inner.candidates(request, device):
            yield candidate
            for size_bytes, part in FASTER:
                yield replace(candidate, workspace_bytes=size_bytes, time_us=part * candidate.time_us)


@dataclass(frozen=True)
class Only(Adapted):
    """A provider without groups except those of one kind, which take `part` of their time."""

    kind: str
    part: float

    def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
        if isinstance(request.attributes, Fused) and request.kind != self.kind:
            return ()
        part = self.part if request.kind == self.kind else 1.0
        return (replace(c, time_us=part * c.time_us) for c in self.inner.candidates(request, device))


ONE_BY_ONE: tuple[Provider, ...] = tuple(Without(provider) for provider in PROVIDERS)


@functools.cache
def table(network: str, precision: str = "fp32", micro_batch: int = 0) -> CandidateTable:
    """Return the candidates of a network of NETWORKS."""
    return planned_table(NETWORKS[network], network, precision, micro_batch)


def planned_table(source: str, name: str, precision: str = "fp32", micro_batch: int = 0) -> CandidateTable:
    """Return the candidates of a network for an H200 with estimated times, without fusion groups.

    Fusion groups round less often than single operations.
    """
    graph = training_graph(source, ("train.precision", precision))
    rules = Rules(micro_batch=micro_batch)
    return CandidateTable(graph, calibrated(find_spec("h200"), None), ONE_BY_ONE, None, rules)


def roomy_problem(network: str, available_bytes: int) -> Problem:
    """Return a problem whose kernels get all the workspace that makes them faster."""
    plain_table = table(network)
    roomy: tuple[Provider, ...] = tuple(Roomy(provider) for provider in ONE_BY_ONE)
    roomy_table = CandidateTable(plain_table.graph, plain_table.device, roomy, None, plain_table.rules)
    names = [operation.name for operation in (*roomy_table.graph.train, *roomy_table.graph.infer)]
    return Problem(Selector.of(roomy_table), dict.fromkeys(names, UNLIMITED_BYTES), available_bytes)


@functools.cache
def draft_of(network: str, precision: str = "fp32", micro_batch: int = 0) -> Draft:
    """Return a draft that keeps every value and writes none in place."""
    tabulated = table(network, precision, micro_batch)
    return emit_launches(tabulated, choose(tabulated, {}))


@functools.cache
def kept_plan(network: str, precision: str = "fp32", micro_batch: int = 0) -> Plan:
    """Return the plan of a network without a limit of memory."""
    return search(table(network, precision, micro_batch), Limits(1 << 40))


def plan_of(plan: Plan, draft: Draft) -> Plan:
    """Return the plan with the programs of a draft."""
    placed = assign_addresses(draft)
    train, infer = (
        replace(program, waits=synchronise(program, draft.buffers, placed.offsets))
        for program in (draft.train, draft.infer)
    )
    sizes = {"arena_bytes": placed.arena_bytes, "host_bytes": placed.host_bytes}
    return replace(
        plan,
        buffers=draft.buffers,
        offsets=placed.offsets,
        train=train,
        infer=infer,
        predictions=replace(plan.predictions, **sizes),
        bounds=replace(plan.bounds, live_bytes=placed.live_bytes),
    )


@functools.cache
def graph_of(source: str, batch: int = 0) -> TrainingGraph:
    """Return the training graph of a source; `batch` replaces the batch of the source."""
    sets = (("batch", str(batch)),) if batch else ()
    return training_graph(source, *sets)


@functools.cache
def planned_for(
    profile: NoSizes | None, source: str, share: float = 0.0, without: tuple[str, ...] = ("concurrent_stream",)
) -> Plan:
    """Return a plan for an H200 with these measurements.

    `share`: share of the arena beside the states, without a limit, that the plan may use; 0: no limit.
    """
    steps, budget_bytes = graph_of(source), 10**12
    if share:
        all_bytes = planned_for(profile, source, 0.0).predictions.arena_bytes  # cached as callers ask for it
        states_bytes = sum(steps.values[state.value].type.size_bytes for state in steps.states)
        budget_bytes = int(states_bytes + share * (all_bytes - states_bytes)) + H200.overhead_bytes
    tabulated = CandidateTable(steps, H200, PROVIDERS, profile, Rules())
    plan = search(tabulated, Limits(budget_bytes, without=frozenset(without)))
    verify_plan(plan)
    return plan


def is_inside(request: Request) -> bool:
    """Return whether a launch recomputes a convolution's result without writing it."""
    return request.kind.startswith("convolution+") and not gives_product(request.attributes)


def stepped(plan: Plan, transfers: Transfers = Transfers.IN_ORDER) -> dict[str, np.ndarray]:
    """Return every state after three steps on noise, and the losses of these steps as `losses`."""
    net = Module(plan, device="cpu", transfers=transfers)
    random = np.random.default_rng(0)
    image, logits = (plan.graph.values[name].type.shape for name in ("image", plan.graph.outputs[0]))
    losses: list[float] = []
    for _ in range(3):
        pixels = random.standard_normal(image).astype(np.float32)
        losses.append(float(net.step(pixels, random.integers(0, logits[1], (logits[0], *logits[2:])), lr=0.05)))
    return {name: np.array(net.state(name)) for name in net.states} | {"losses": np.array(losses)}


def trained(plan: Plan, transfers: Transfers = Transfers.IN_ORDER) -> dict[str, bytes]:
    """Return the bytes of what `stepped` returns."""
    return {name: state.tobytes() for name, state in stepped(plan, transfers).items()}


def assert_equal_but_for_rounding(plan: Plan, single: Plan) -> None:
    """Assert that a plan in fp64 computes what the plan of single operations does."""
    wanted = stepped(single)
    for name, state in stepped(plan).items():
        np.testing.assert_allclose(state, wanted[name], rtol=1e-9, atol=1e-12, err_msg=name)


def distance(states: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]) -> float:
    """Return the L2 distance of all states after some steps from the exact ones."""
    return float(np.sqrt(sum(np.sum((states[name] - exact[name]) ** 2) for name in exact if name != "losses")))
