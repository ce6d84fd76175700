"""The table of candidates: every provider's kernels for each operation, looked up once per distinct request.

It also holds the Pareto fronts of divisions into micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from mbc.hardware.spec import DeviceSpec
from mbc.ir.graph import Operation, TrainingGraph
from mbc.ir.types import Layout, TensorType, layout_matters
from mbc.kernels.base import Candidate, Provider, Request
from mbc.kernels.cuda import is_calibrated
from mbc.kernels.statistics import STATISTICS_GROUPS
from mbc.ops.base import NoAttributes
from mbc.ops.convolution import Convolution
from mbc.ops.fused import Fused, kind_of, names_of
from mbc.optimize import effort
from mbc.optimize.candidates.estimates import Estimates, sooner, with_leaner
from mbc.optimize.candidates.fronts import ParetoFronts, fronts_in_micro_batches, fronts_of
from mbc.optimize.candidates.numbered_answers import NumberedAnswers, RequestKey
from mbc.optimize.candidates.pareto import ParetoFront
from mbc.optimize.candidates.scaled_times import OtherSizes, RematKernels
from mbc.optimize.candidates.user_rules import Rules, no_candidate
from mbc.options import Policy
from mbc.plan.model import Rows
from mbc.profile.model import Profile

MICRO_BATCH_ALIGNMENT_BYTES = 16  # of every operand of a micro-batch: candidates were measured with this alignment


@dataclass
class CandidateTable:
    """Candidates of the operations of one graph on one device.

    Equal requests have equal answers, so a deep network of few distinct layers costs little.

    Attributes:
        graph: The training graph.
        device: The GPU.
        providers: Providers of kernels.
        profile: Measurements on this GPU.
        rules: The user's rules.
        recomputed: Convolutions, by name, that launches of these kernels recompute elsewhere
            (`mbc.optimize.fusion.bitwise_remat_match`). Only kernels that give the same bits run them.
        optimism: Share of the estimate of a candidate that counts as its measured time; 0 leaves it an estimate.
    """

    graph: TrainingGraph
    device: DeviceSpec
    providers: tuple[Provider, ...]
    profile: Profile | None = None
    rules: Rules = field(default_factory=Rules)
    recomputed: Mapping[str, RematKernels] = field(default_factory=dict[str, RematKernels])
    optimism: float = 0.0
    _offered_by_request: dict[RequestKey, tuple[Candidate, ...]] = field(
        default_factory=dict[RequestKey, tuple[Candidate, ...]]
    )
    _of_micro_batches: dict[RequestKey, tuple[Candidate, ...]] = field(
        default_factory=dict[RequestKey, tuple[Candidate, ...]]
    )
    _fronts: dict[RequestKey, ParetoFronts] = field(default_factory=dict[RequestKey, ParetoFronts])
    _divided: dict[RequestKey, ParetoFronts] = field(default_factory=dict[RequestKey, ParetoFronts])
    _numbered: NumberedAnswers = field(default_factory=NumberedAnswers, repr=False, compare=False)
    _conversions: dict[tuple[TensorType, Layout], float] = field(default_factory=dict[tuple[TensorType, Layout], float])

    def without_determinism(self) -> CandidateTable:
        """Return the table with nondeterministic kernels, which shows how much time `deterministic = true` costs."""
        given, rules = (self.graph, self.device, self.providers, self.profile), replace(self.rules, deterministic=False)
        return CandidateTable(*given, rules, self.recomputed, self.optimism)

    def of(self, graph: TrainingGraph) -> CandidateTable:
        """Return the table of another graph of the same mini-batch."""
        return self._like(graph, self.recomputed)

    def with_recomputed(self, recomputed: Mapping[str, RematKernels]) -> CandidateTable:
        """Return the table with other recomputed convolutions."""
        return self if recomputed == self.recomputed else self._like(self.graph, recomputed)

    def on(self, device: DeviceSpec) -> CandidateTable:
        """Return the table with the links of `device`, which must be the GPU of this table."""
        return replace(self, device=device)

    def _like(self, graph: TrainingGraph, recomputed: Mapping[str, RematKernels]) -> CandidateTable:
        """Return a table that shares the answers to requests with this one."""
        assert graph.batch == self.graph.batch
        copy = CandidateTable(graph, self.device, self.providers, self.profile, self.rules, recomputed, self.optimism)
        copy._offered_by_request, copy._of_micro_batches = self._offered_by_request, self._of_micro_batches
        copy._fronts, copy._divided = self._fronts, self._divided
        copy._conversions, copy.other_sizes = self._conversions, self.other_sizes
        return copy

    @cached_property
    def _sum_layouts(self) -> Mapping[str, Layout]:
        return dict(self.rules.sum_layouts)

    @property
    def whole(self) -> Rows:
        """All rows of the mini-batch."""
        return Rows(0, self.graph.batch)

    @cached_property
    def values_with_layout(self) -> frozenset[str]:
        """Values that may be in either layout."""
        values = self.graph.values
        return frozenset(name for name, value in values.items() if value.type.ordered)

    def request(self, operation: Operation, rows: Rows) -> Request:
        """Return the request for a launch of the operation over `rows`."""
        return request_of(self.graph, operation, rows)

    def candidates(self, operation: Operation, rows: Rows) -> tuple[Candidate, ...]:
        """Return every admitted candidate: those of the profile, measured or scaled from other sizes, else estimates.

        An optimistic estimate must not beat a measurement. So where a profile has candidates, only estimates that need
        less workspace than all of them are added, and none counts as faster.

        Raises:
            MbcError: MBC200 or MBC202, if there is no candidate.
        """
        is_whole = rows.count == self.graph.batch
        offered = self.offered(operation) if is_whole else self._offered(operation, self.request(operation, rows))
        if not offered:
            request = self.request(operation, rows)
            error = no_candidate(self.rules, self.providers, self.device, operation, request)
            raise error
        return offered

    def candidates_of_micro_batch(self, operation: Operation, rows: Rows) -> tuple[Candidate, ...]:
        """Return every admitted candidate of a micro-batch, for comparisons among micro-batches only.

        Times scaled from larger sizes are included, for kernels that were not measured at so few rows.

        Raises:
            MbcError: MBC200 or MBC202, if there is no candidate.
        """
        if self.other_sizes is None or rows.count >= self.graph.batch:
            return self.candidates(operation, rows)
        request = self.request(operation, rows)
        key = request, self._remat_kernels(operation)
        candidates = self._of_micro_batches.get(key)
        if candidates is None:
            candidates = self._of_micro_batches[key] = tuple(
                _with_plain_layouts(c, request) for c in self._find_micro_batch(*key)
            )
        if not candidates:
            error = no_candidate(self.rules, self.providers, self.device, operation, request)
            raise error
        return candidates

    def profiled(self, operation: Operation, rows: Rows) -> tuple[Candidate, ...]:
        """Return the candidates that the profile alone has."""
        request = self.request(operation, rows)
        candidates = self._of_profile(request, self._remat_kernels(operation))
        return tuple(_with_plain_layouts(candidate, request) for candidate in candidates)

    def offered(self, operation: Operation) -> tuple[Candidate, ...]:
        """Return the candidates for the whole mini-batch; empty if a fusion group has none."""
        number = self._number(operation)
        candidates = self._numbered.offered.get(number)
        if candidates is None:
            candidates = self._numbered.offered[number] = self._offered(operation, self.request(operation, self.whole))
        return candidates

    def timed(self, operation: Operation) -> bool:
        """Return whether a profile has times of the operation for the whole mini-batch, or leaves it to its estimate.

        The time may then be compared with measured times.
        """
        return self.has_profiled_time(operation) or self.compares_estimate(operation)

    def has_profiled_time(self, operation: Operation) -> bool:
        """Return whether a profile has times of admitted kernels for the whole mini-batch.

        The profile may be this GPU's or a similar one's. The times are measured, scaled from other sizes, or of an
        earlier version of the kernel.
        """
        number = self._number(operation)
        is_profiled = self._numbered.is_profiled.get(number)
        if is_profiled is None:
            is_profiled = self._numbered.is_profiled[number] = self.optimism > 0 or self._is_profiled(operation)
        return is_profiled

    def _is_profiled(self, operation: Operation) -> bool:
        request, remat_kernels = self.request(operation, self.whole), self._remat_kernels(operation)
        return bool(self._of_profile(request, remat_kernels) or self.estimates.of_similar_gpu(request, remat_kernels))

    def has_calibrated_estimate(self, operation: Operation) -> bool:
        """Return whether the GPU has no profile, and the model's shares were fitted to a kernel of the operation."""
        return self.profile is None and any(is_calibrated(candidate.name) for candidate in self.modelled(operation))

    def failed(self, operation: Operation) -> bool:
        """Return whether measuring the operation was tried here for the whole mini-batch, and no kernel is left."""
        return not self.has_profiled_time(operation) and self.estimates.failed(self.request(operation, self.whole))

    def _of_profile(self, request: Request, remat_kernels: RematKernels) -> tuple[Candidate, ...]:
        """Return the admitted candidates of this GPU's profile."""
        return self.other_sizes.nearest(request, remat_kernels) if self.other_sizes else ()

    def compares_estimate(self, operation: Operation) -> bool:
        """Return whether the profile leaves the operation to its estimate for the whole mini-batch.

        `Profile.left_to_estimate` says why.
        """
        if self.profile is None:
            return False
        number = self._number(operation)
        compares = self._numbered.compares_estimate.get(number)
        if compares is None:
            compares = self.profile.compares_estimate(self.request(operation, self.whole))
            self._numbered.compares_estimate[number] = compares
        return compares

    def modelled(self, operation: Operation) -> tuple[Candidate, ...]:
        """Return the admitted candidates for the whole mini-batch with the model's times, whether measured or not."""
        number = self._number(operation)
        candidates = self._numbered.modelled.get(number)
        if candidates is None:
            request = self.request(operation, self.whole)
            candidates = self._numbered.modelled[number] = self.estimates.modelled(
                request, self._remat_kernels(operation)
            )
        return candidates

    def _number(self, operation: Operation) -> int:
        """Return the number of the operation's request for the whole mini-batch."""
        names = operation.name, operation.outputs
        number = self._numbered.numbers.get(names)
        if number is None:
            key, requests = (
                (self.request(operation, self.whole), self._remat_kernels(operation)),
                self._numbered.requests,
            )
            number = self._numbered.numbers[names] = requests.setdefault(key, len(requests))
        return number

    def _offered(self, operation: Operation, request: Request) -> tuple[Candidate, ...]:
        if 0 < self.rules.micro_batch < self.graph.batch and _holds_convolution(operation):
            return ()  # a fusion group runs undivided
        key = request, self._remat_kernels(operation)
        candidates = self._offered_by_request.get(key)
        if candidates is None:
            candidates = self._offered_by_request[key] = tuple(
                _with_plain_layouts(c, request) for c in self._find(*key)
            )
        return candidates

    def _remat_kernels(self, operation: Operation) -> RematKernels:
        """Return the kernels that recompute the outputs of an operation or group."""
        computes = operation.kind in ("convolution", *STATISTICS_GROUPS)
        return self.recomputed.get(names_of(operation)[0], RematKernels()) if computes else RematKernels()

    @cached_property
    def estimates(self) -> Estimates:
        """Estimated times of the candidates."""
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
        profiled = self._of_profile(request, remat_kernels)
        if self.optimism and self.other_sizes:
            near = self.other_sizes.is_near(request)
            profiled = sooner(profiled, effort.SCALED_OPTIMISM if near else self.optimism)
        later = self.estimates.later_on_similar_gpu(request, remat_kernels)
        return (*later, *self._with_estimates(profiled, request, remat_kernels))

    def _find_micro_batch(self, request: Request, remat_kernels: RematKernels) -> tuple[Candidate, ...]:
        assert self.profile is not None and self.other_sizes is not None
        profiled = self._of_profile(request, remat_kernels)
        scaled = self.estimates.admitted(self.other_sizes.candidates(request), remat_kernels)
        if not profiled:
            return self._with_estimates(scaled, request, remat_kernels)
        return (*scaled, *self._with_estimates(profiled, request, remat_kernels))

    def _with_estimates(
        self, profiled: tuple[Candidate, ...], request: Request, remat_kernels: RematKernels
    ) -> tuple[Candidate, ...]:
        """Return `profiled` candidates and leaner estimated ones; without profiled ones, all estimates."""
        if (
            self.optimism
            and isinstance(request.attributes, Fused)
            and not profiled
            and self.estimates.was_tried(request)
        ):
            return ()
        return with_leaner(request, profiled, self.estimates.of(request, remat_kernels))

    def micro_batch_rows(self, operation: Operation) -> tuple[int, ...]:
        """Return the rows that a kernel call of the operation may work on, largest first.

        They are all rows of the mini-batch, and the smaller sizes that policy and alignment admit. A mini-batch of many
        rows is divided in steps of several rows, which bounds the search.
        """
        batch = self.graph.batch
        step = 1 << max(0, (batch - 1).bit_length() - effort.MAX_MICRO_BATCHES.bit_length() + 1)
        if self.rules.policy is Policy.UNDIVIDED or batch % step:
            return (batch,)
        if self.rules.policy is Policy.ALL:
            return self.possible(operation, range(step, batch, step))
        return self.possible(operation, (1 << k for k in range(step.bit_length() - 1, batch.bit_length())))

    def possible(self, operation: Operation, sizes: Iterable[int]) -> tuple[int, ...]:
        """Return the whole batch and those of `sizes` that the operation may be divided into, largest first."""
        if not self.divisible(operation):
            return (self.graph.batch,)
        least = self.aligned_rows(operation)
        smaller = (n for n in sizes if n < self.graph.batch and n % least == 0)
        return (self.graph.batch, *sorted(smaller, reverse=True))

    def divisible(self, operation: Operation) -> bool:
        """Return whether dividing the operation can save workspace; only convolutions among divisible ones have any."""
        return kind_of(operation).divisible and isinstance(operation.attributes, Convolution)

    def aligned_rows(self, operation: Operation) -> int:
        """Return the least number of rows whose multiples start at aligned addresses in every operand."""
        values = (self.graph.values[name] for name in (*operation.inputs, *operation.outputs))
        row_bytes = (v.type.size_bytes // self.graph.batch for v in values if v.per_sample)
        return math.lcm(
            *(MICRO_BATCH_ALIGNMENT_BYTES // math.gcd(MICRO_BATCH_ALIGNMENT_BYTES, size) for size in row_bytes)
        )

    def fronts(self, operation: Operation) -> ParetoFronts:
        """Return the Pareto front of the operation's divisions for each combination of layouts; never empty."""
        layout = self._sum_layouts.get(operation.name)
        key = self._number(operation) if layout is None else (operation.name, operation.outputs)
        fronts = self._numbered.fronts.get(key)
        if fronts is None:
            request_key = self.request(operation, self.whole), self._remat_kernels(operation)
            fronts = self._fronts.get(request_key)
            if fronts is None:
                fronts = self._fronts[request_key] = fronts_of(self, operation)
            if layout is not None:
                fronts = {layouts: front for layouts, front in fronts.items() if layouts[0] is layout}
            self._numbered.fronts[key] = fronts
        return fronts

    def fronts_in_micro_batches(self, operation: Operation, rows: int) -> ParetoFronts:
        """Return the fronts with all rows in micro-batches of `rows` rows; empty if that is impossible.

        The last micro-batch may be smaller.
        """
        key = self.request(operation, Rows(0, rows)), self._remat_kernels(operation)
        fronts = self._divided.get(key)
        if fronts is None:
            fronts = self._divided[key] = fronts_in_micro_batches(self, operation, rows)
        return fronts

    def conversion_us(self, type_: TensorType, target: Layout) -> float:
        """Return the time to convert a whole value to the layout `target`.

        It is measured, or else the time to read and write each byte once.
        """
        time_us = self._conversions.get((type_, target))
        if time_us is None:
            time_us = self._conversions[type_, target] = self._conversion_us(type_, target)
        return time_us

    def _conversion_us(self, type_: TensorType, target: Layout) -> float:
        request = conversion_request(type_, self.graph)
        source = next(layout for layout in Layout if layout is not target)
        measured = self.profile.candidates(request) if self.profile is not None else ()
        estimated = (c for p in self.providers for c in p.candidates(request, self.device))
        for candidates in (measured, estimated):
            times = [c.time_us for c in candidates if c.layouts == (source, target)]
            if times:
                return min(times)
        return 2 * type_.size_bytes / (self.device.copy_gb_s * 1e3) + self.device.launch_us

    def is_conversion_measured(self, type_: TensorType) -> bool:
        """Return whether `conversion_us` is from the profile."""
        return self.profile is not None and bool(self.profile.candidates(conversion_request(type_, self.graph)))


def _holds_convolution(operation: Operation) -> bool:
    attributes = operation.attributes
    return isinstance(attributes, Fused) and any(isinstance(m.attributes, Convolution) for m in attributes.members)


def request_of(graph: TrainingGraph, operation: Operation, rows: Rows) -> Request:
    """Return the request for a launch of an operation over `rows`."""

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
    """Return the request for a change of layout, for providers and profiles."""
    return Request("convert", NoAttributes(), (type_,), (type_,), graph.precision)


def least_workspace_bytes(fronts: Mapping[tuple[Layout, ...], ParetoFront]) -> int:
    """Return the workspace of the candidate that needs least, in any layouts."""
    return min(front[0].workspace_bytes for front in fronts.values())


def _with_plain_layouts(candidate: Candidate, request: Request) -> Candidate:
    """Return the candidate with CHANNELS_FIRST for operands whose layout does not matter, so that none is converted."""
    types = (*request.inputs, *request.outputs)
    layouts = tuple(
        layout if layout_matters(type_.shape) else Layout.CHANNELS_FIRST
        for layout, type_ in zip(candidate.layouts, types, strict=True)
    )
    return candidate if layouts == candidate.layouts else replace(candidate, layouts=layouts)
