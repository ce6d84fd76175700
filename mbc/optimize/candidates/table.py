"""The table of candidates: every provider's kernels for each operation, and the Pareto front of its divisions into
micro-batches, asked once per distinct request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mbc.hardware.spec import DeviceSpec
from mbc.ir.graph import Operation, TrainingGraph
from mbc.ir.types import Layout, TensorType, layout_matters
from mbc.kernels.base import Candidate, Provider, Request
from mbc.kernels.statistics import WITH_STATISTICS
from mbc.ops.base import NoAttributes
from mbc.ops.convolution import Convolution
from mbc.ops.fused import Fused, kind_of, names_of
from mbc.optimize import effort
from mbc.optimize.candidates.estimates import Estimates, sooner, with_leaner
from mbc.optimize.candidates.fronts import ParetoFronts, fronts_in_micro_batches, fronts_of
from mbc.optimize.candidates.pareto import ParetoFront
from mbc.optimize.candidates.scaled_times import OtherSizes, RematKernels
from mbc.optimize.candidates.user_rules import Rules, no_candidate
from mbc.options import Policy
from mbc.plan.model import Rows
from mbc.profile.model import Profile

_Key = tuple[Request, RematKernels]
MICRO_BATCH_ALIGNMENT_BYTES = 16  # of every operand of a micro-batch: what candidates were measured with


@dataclass
class CandidateTable:
    """Candidates of the operations of one graph on one device.

    `recomputed`: convolutions, by name, that launches of these kernels recompute elsewhere
    (`mbc.optimize.fusion.bitwise_remat_match`). They run only by kernels that give the same bits. `optimism`: what
    was not measured counts as measured, at this share of its estimate; 0: it counts as what it is.

    The answers are the same for equal requests, so a deep network of few distinct layers costs little.
    """

    graph: TrainingGraph
    device: DeviceSpec
    providers: tuple[Provider, ...]
    profile: Profile | None = None
    rules: Rules = field(default_factory=Rules)
    recomputed: Mapping[str, RematKernels] = field(default_factory=dict[str, RematKernels])
    optimism: float = 0.0
    _known: dict[_Key, tuple[Candidate, ...]] = field(default_factory=dict[_Key, tuple[Candidate, ...]])
    _of_micro_batches: dict[_Key, tuple[Candidate, ...]] = field(default_factory=dict[_Key, tuple[Candidate, ...]])
    _fronts: dict[_Key, ParetoFronts] = field(default_factory=dict[_Key, ParetoFronts])
    _divided: dict[_Key, ParetoFronts] = field(default_factory=dict[_Key, ParetoFronts])
    # The same by names of operations and their outputs, which a deep network asks for over and over.
    _named: dict[tuple[Any, ...], Any] = field(default_factory=dict[tuple[Any, ...], Any], repr=False, compare=False)
    # What `mbc.optimize.selection.select` found, by what it was asked; the groups of
    # `mbc.optimize.fusion.select_groups`, by program.
    chosen: dict[tuple[Any, ...], Any] = field(default_factory=dict[tuple[Any, ...], Any], repr=False, compare=False)
    groups: dict[str, Any] = field(default_factory=dict[str, Any], repr=False, compare=False)
    # Gradient buckets (`mbc.optimize.search.solution`), which steps with and without ReLU bit masks have alike.
    buckets: dict[str, Any] = field(default_factory=dict[str, Any], repr=False, compare=False)
    _conversions: dict[tuple[TensorType, Layout], float] = field(default_factory=dict[tuple[TensorType, Layout], float])

    def without_determinism(self) -> CandidateTable:
        """The same table with nondeterministic kernels: the difference is what `deterministic = true` costs."""
        rules = replace(self.rules, deterministic=False)
        return CandidateTable(
            self.graph, self.device, self.providers, self.profile, rules, self.recomputed, self.optimism
        )

    def of(self, graph: TrainingGraph) -> CandidateTable:
        """The same for another graph of the same mini-batch."""
        return self._like(graph, self.recomputed)

    def with_recomputed(self, recomputed: Mapping[str, RematKernels]) -> CandidateTable:
        """The same with recomputed convolutions."""
        return self if recomputed == self.recomputed else self._like(self.graph, recomputed)

    def on(self, device: DeviceSpec) -> CandidateTable:
        """The same with the links of `device`, which is the same GPU."""
        return replace(self, device=device, chosen={}, groups={}, buckets={})

    def _like(self, graph: TrainingGraph, recomputed: Mapping[str, RematKernels]) -> CandidateTable:
        """With the same answers to equal requests."""
        assert graph.batch == self.graph.batch
        copy = CandidateTable(graph, self.device, self.providers, self.profile, self.rules, recomputed, self.optimism)
        copy._known, copy._of_micro_batches = self._known, self._of_micro_batches
        copy._fronts, copy._divided = self._fronts, self._divided
        copy._conversions, copy.buckets, copy.other_sizes = self._conversions, self.buckets, self.other_sizes
        if graph is self.graph and "matches" in self.groups:
            copy.groups["matches"] = self.groups["matches"]  # which are of the graph alone
        return copy

    @cached_property
    def _sum_layouts(self) -> Mapping[str, Layout]:
        return dict(self.rules.sum_layouts)

    @property
    def whole(self) -> Rows:
        return Rows(0, self.graph.batch)

    @cached_property
    def layouted(self) -> frozenset[str]:
        """Values that may be in either layout."""
        values = self.graph.values
        return frozenset(name for name, value in values.items() if value.type.ordered)

    def request(self, operation: Operation, rows: Rows) -> Request:
        return request_of(self.graph, operation, rows)

    def candidates(self, operation: Operation, rows: Rows) -> tuple[Candidate, ...]:
        """Every admitted candidate: those of the profile, measured or scaled from other sizes, else estimates.

        An optimistic estimate must not beat a measurement: where a profile has candidates, estimates are added only of
        those that need less workspace than all of them, and none as faster. MBC200 and MBC202 where there is none.
        """
        request = self.request(operation, rows)
        known = self._offered(operation, request)
        if not known:
            raise no_candidate(self.rules, self.providers, self.device, operation, request)
        return known

    def candidates_of_micro_batch(self, operation: Operation, rows: Rows) -> tuple[Candidate, ...]:
        """The same of a micro-batch that is not compared with the whole mini-batch, including times scaled from larger
        sizes, of kernels that were not measured at so few rows. MBC200 and MBC202 as before."""
        if self.other_sizes is None or rows.count >= self.graph.batch:
            return self.candidates(operation, rows)
        request = self.request(operation, rows)
        key = request, self._remat_kernels(operation)
        known = self._of_micro_batches.get(key)
        if known is None:
            known = self._of_micro_batches[key] = tuple(
                _with_plain_layouts(c, request) for c in self._find_micro_batch(*key)
            )
        if not known:
            raise no_candidate(self.rules, self.providers, self.device, operation, request)
        return known

    def profiled(self, operation: Operation, rows: Rows) -> tuple[Candidate, ...]:
        """Those of the profile alone."""
        request = self.request(operation, rows)
        found = self._of_profile(request, self._remat_kernels(operation))
        return tuple(_with_plain_layouts(candidate, request) for candidate in found)

    def offered(self, operation: Operation) -> tuple[Candidate, ...]:
        """`candidates` for the whole mini-batch, but empty where there are none: fusion groups need not have any."""
        key = "offered", operation.name, operation.outputs
        known = self._named.get(key)
        if known is None:
            known = self._named[key] = self._offered(operation, self.request(operation, self.whole))
        return known

    def timed(self, operation: Operation) -> bool:
        """Whether its time for the whole mini-batch is `known`, or a profile leaves it to its estimate, which may then
        be compared with what was measured."""
        return self.known(operation) or self.compares_estimate(operation)

    def known(self, operation: Operation) -> bool:
        """Whether a profile has times of admitted kernels for the whole mini-batch, this GPU's or a similar one's:
        measured, scaled from other sizes, or of an earlier version of the kernel."""
        key = "known", operation.name, operation.outputs
        known = self._named.get(key)
        if known is None:
            known = self._named[key] = self.optimism > 0 or self._is_known(operation)
        return known

    def _is_known(self, operation: Operation) -> bool:
        request, remat_kernels = self.request(operation, self.whole), self._remat_kernels(operation)
        return bool(self._of_profile(request, remat_kernels) or self.estimates.of_similar_gpu(request, remat_kernels))

    def failed(self, operation: Operation) -> bool:
        """Whether it was tried to measure it here for the whole mini-batch, and no kernel is left."""
        return not self.known(operation) and self.estimates.failed(self.request(operation, self.whole))

    def _of_profile(self, request: Request, remat_kernels: RematKernels) -> tuple[Candidate, ...]:
        """Admitted candidates that the profile of this GPU knows."""
        return self.other_sizes.nearest(request, remat_kernels) if self.other_sizes else ()

    def compares_estimate(self, operation: Operation) -> bool:
        """Whether the profile leaves it to its estimate for the whole mini-batch (`Profile.left_to_estimate`)."""
        return self.profile is not None and self.profile.compares_estimate(self.request(operation, self.whole))

    def modelled(self, operation: Operation) -> tuple[Candidate, ...]:
        """Admitted candidates for the whole mini-batch with the model's estimates, whatever was measured."""
        key = "modelled", operation.name, operation.outputs
        known = self._named.get(key)
        if known is None:
            request = self.request(operation, self.whole)
            known = self._named[key] = self.estimates.modelled(request, self._remat_kernels(operation))
        return known

    def _offered(self, operation: Operation, request: Request) -> tuple[Candidate, ...]:
        if 0 < self.rules.micro_batch < self.graph.batch and _holds_convolution(operation):
            return ()  # a fusion group runs undivided
        key = request, self._remat_kernels(operation)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = tuple(_with_plain_layouts(c, request) for c in self._find(*key))
        return known

    def _remat_kernels(self, operation: Operation) -> RematKernels:
        """Kernels that recompute the outputs of an operation or group."""
        computes = operation.kind in ("convolution", WITH_STATISTICS)
        return self.recomputed.get(names_of(operation)[0], RematKernels()) if computes else RematKernels()

    @cached_property
    def estimates(self) -> Estimates:
        return Estimates(
            self.providers, self.device, self.profile, self.other_sizes, self.rules, self.graph.precision, self.optimism
        )

    @cached_property
    def other_sizes(self) -> OtherSizes | None:
        """Times scaled from the measured sizes of the profile."""
        if self.profile is None:
            return None
        return OtherSizes(self.profile, self.providers, self.device, self.graph.batch, self.graph.precision, self.rules)

    def _find(self, request: Request, remat_kernels: RematKernels) -> tuple[Candidate, ...]:
        known = self._of_profile(request, remat_kernels)
        if self.optimism and self.other_sizes:
            near = self.other_sizes.is_near(request)
            known = sooner(known, effort.SCALED_OPTIMISM if near else self.optimism)
        later = self.estimates.later_on_similar_gpu(request, remat_kernels)
        return (*later, *self._with_estimates(known, request, remat_kernels))

    def _find_micro_batch(self, request: Request, remat_kernels: RematKernels) -> tuple[Candidate, ...]:
        assert self.profile is not None and self.other_sizes is not None
        known = self._of_profile(request, remat_kernels)
        scaled = self.estimates.admitted(self.other_sizes.candidates(request), remat_kernels)
        if not known:
            return self._with_estimates(scaled, request, remat_kernels)
        return (*scaled, *self._with_estimates(known, request, remat_kernels))

    def _with_estimates(
        self, known: tuple[Candidate, ...], request: Request, remat_kernels: RematKernels
    ) -> tuple[Candidate, ...]:
        """`known` candidates of a profile, and estimates of those that need less workspace; all estimates where a
        profile has none."""
        if self.optimism and isinstance(request.attributes, Fused) and not known and self.estimates.was_tried(request):
            return ()
        return with_leaner(request, known, self.estimates.of(request, remat_kernels))

    def micro_batch_rows(self, operation: Operation) -> tuple[int, ...]:
        """Rows that a kernel call of the operation may work on, largest first: all of them, and the smaller sizes that
        policy and alignment admit. A mini-batch of many rows is divided in steps of several, which bounds the
        search."""
        batch = self.graph.batch
        step = 1 << max(0, (batch - 1).bit_length() - effort.MAX_MICRO_BATCHES.bit_length() + 1)
        if self.rules.policy is Policy.UNDIVIDED or batch % step:
            return (batch,)
        if self.rules.policy is Policy.ALL:
            return self.possible(operation, range(step, batch, step))
        return self.possible(operation, (1 << k for k in range(step.bit_length() - 1, batch.bit_length())))

    def possible(self, operation: Operation, sizes: Iterable[int]) -> tuple[int, ...]:
        """The whole batch and those of `sizes` that the operation may be divided into, largest first."""
        if not self.divisible(operation):
            return (self.graph.batch,)
        least = self.aligned_rows(operation)
        smaller = (n for n in sizes if n < self.graph.batch and n % least == 0)
        return (self.graph.batch, *sorted(smaller, reverse=True))

    def divisible(self, operation: Operation) -> bool:
        """Whether dividing the operation can save anything: of divisible operations only convolutions have
        workspace."""
        return kind_of(operation).divisible and isinstance(operation.attributes, Convolution)

    def aligned_rows(self, operation: Operation) -> int:
        """Micro-batches of multiples of so many rows start at aligned addresses in every operand."""
        values = (self.graph.values[name] for name in (*operation.inputs, *operation.outputs))
        row_bytes = (v.type.size_bytes // self.graph.batch for v in values if v.per_sample)
        return math.lcm(
            *(MICRO_BATCH_ALIGNMENT_BYTES // math.gcd(MICRO_BATCH_ALIGNMENT_BYTES, size) for size in row_bytes)
        )

    def fronts(self, operation: Operation) -> ParetoFronts:
        """Per combination of layouts the Pareto front of the operation's divisions; never empty."""
        key = "fronts", operation.name, operation.outputs
        known = self._named.get(key)
        if known is None:
            request_key = self.request(operation, self.whole), self._remat_kernels(operation)
            known = self._fronts.get(request_key)
            if known is None:
                known = self._fronts[request_key] = fronts_of(self, operation)
            layout = self._sum_layouts.get(operation.name)
            if layout is not None:
                known = {layouts: front for layouts, front in known.items() if layouts[0] is layout}
            self._named[key] = known
        return known

    def fronts_in_micro_batches(self, operation: Operation, rows: int) -> ParetoFronts:
        """As `fronts`, with all rows in micro-batches of so many (the last may be smaller); empty where that is
        impossible."""
        key = self.request(operation, Rows(0, rows)), self._remat_kernels(operation)
        known = self._divided.get(key)
        if known is None:
            known = self._divided[key] = fronts_in_micro_batches(self, operation, rows)
        return known

    def conversion_us(self, type_: TensorType, target: Layout) -> float:
        """Time of changing the layout of a whole value to `target`: measured, else each byte read and written once."""
        known = self._conversions.get((type_, target))
        if known is None:
            known = self._conversions[type_, target] = self._conversion_us(type_, target)
        return known

    def _conversion_us(self, type_: TensorType, target: Layout) -> float:
        request = conversion_request(type_, self.graph)
        source = next(layout for layout in Layout if layout is not target)
        measured = self.profile.candidates(request) if self.profile is not None else ()
        estimated = (c for p in self.providers for c in p.candidates(request, self.device))
        for found in (measured, estimated):
            times = [c.time_us for c in found if c.layouts == (source, target)]
            if times:
                return min(times)
        return 2 * type_.size_bytes / (self.device.copy_gb_s * 1e3) + self.device.launch_us

    def is_conversion_measured(self, type_: TensorType) -> bool:
        """Whether `conversion_us` is from the profile."""
        return self.profile is not None and bool(self.profile.candidates(conversion_request(type_, self.graph)))


def _holds_convolution(operation: Operation) -> bool:
    attributes = operation.attributes
    return isinstance(attributes, Fused) and any(isinstance(m.attributes, Convolution) for m in attributes.members)


def request_of(graph: TrainingGraph, operation: Operation, rows: Rows) -> Request:
    """The part of an operation that a launch over `rows` does."""

    def type_of(name: str) -> TensorType:
        value = graph.values[name]
        return value.type.with_rows(rows.count) if value.per_sample else value.type

    return Request(
        operation.kind,
        operation.attributes,
        tuple(map(type_of, operation.inputs)),
        tuple(map(type_of, operation.outputs)),
        graph.precision,
    )


def conversion_request(type_: TensorType, graph: TrainingGraph) -> Request:
    """A change of layout as providers and profiles see it."""
    return Request("convert", NoAttributes(), (type_,), (type_,), graph.precision)


def least_workspace_bytes(fronts: Mapping[tuple[Layout, ...], ParetoFront]) -> int:
    """Workspace of the candidate that needs least, in any layouts."""
    return min(front[0].workspace_bytes for front in fronts.values())


def _with_plain_layouts(candidate: Candidate, request: Request) -> Candidate:
    """Operands whose layout does not matter are CHANNELS_FIRST, so that none is converted."""
    types = (*request.inputs, *request.outputs)
    layouts = tuple(
        layout if layout_matters(type_.shape) else Layout.CHANNELS_FIRST
        for layout, type_ in zip(candidate.layouts, types, strict=True)
    )
    return candidate if layouts == candidate.layouts else replace(candidate, layouts=layouts)
