"""The table of candidates: every provider's kernels for each operation, asked once per distinct request, and the menu
of its divisions into micro-batches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mbc.hardware.spec import DeviceSpec
from mbc.ir.graph import Operation, TrainingGraph
from mbc.ir.types import Layout, TensorType, layout_matters
from mbc.kernels.base import Candidate, Provider, Request
from mbc.kernels.cuda import bitwise_equal_to
from mbc.kernels.statistics import WITH_STATISTICS
from mbc.ops.base import NoAttributes
from mbc.ops.convolution import Convolution
from mbc.ops.fused import Fused, kind_of, names_of
from mbc.optimize import effort
from mbc.optimize.candidates.pareto import Menu, fixed, menu, worthwhile
from mbc.optimize.candidates.rules import Rules, no_candidate
from mbc.optimize.candidates.scale_rows import LargerSizes
from mbc.options import Policy
from mbc.plan.model import Rows
from mbc.profile.model import Profile

Repeaters = frozenset[str]  # names of kernels
Menus = Mapping[tuple[Layout, ...], Menu]  # by layouts of the operands
_Asked = tuple[Request, Repeaters]
SLICE_ALIGNMENT_BYTES = 16  # of every operand of a slice: what candidates were measured with


@dataclass
class CandidateTable:
    """Candidates of the operations of one graph on one device.

    `repeated`: convolutions, by name, that launches of these kernels recompute elsewhere
    (`mbc.optimize.fusion.bitwise_remat_match`). They run only by kernels that give the same bits.

    The answers are the same for equal requests, so a deep network of few distinct layers costs little.
    """

    graph: TrainingGraph
    device: DeviceSpec
    providers: tuple[Provider, ...]
    profile: Profile | None = None
    rules: Rules = field(default_factory=Rules)
    repeated: Mapping[str, Repeaters] = field(default_factory=dict[str, Repeaters])
    _known: dict[_Asked, tuple[Candidate, ...]] = field(default_factory=dict[_Asked, tuple[Candidate, ...]])
    _of_parts: dict[_Asked, tuple[Candidate, ...]] = field(default_factory=dict[_Asked, tuple[Candidate, ...]])
    _menus: dict[_Asked, Menus] = field(default_factory=dict[_Asked, Menus])
    _divided: dict[_Asked, Menus] = field(default_factory=dict[_Asked, Menus])
    # The same by names of operations and their outputs, which a deep network asks for over and over.
    _named: dict[tuple[Any, ...], Any] = field(default_factory=dict[tuple[Any, ...], Any], repr=False, compare=False)
    # What `mbc.optimize.selection.select` found, by what it was asked; the groups of
    # `mbc.optimize.fusion.select_groups`, by program.
    chosen: dict[tuple[Any, ...], Any] = field(default_factory=dict[tuple[Any, ...], Any], repr=False, compare=False)
    groups: dict[str, Any] = field(default_factory=dict[str, Any], repr=False, compare=False)
    _conversions: dict[tuple[TensorType, Layout], float] = field(default_factory=dict[tuple[TensorType, Layout], float])

    def without_determinism(self) -> CandidateTable:
        """The same table with kernels that give other bits in each run: what `deterministic = true` costs."""
        rules = replace(self.rules, deterministic=False)
        return CandidateTable(self.graph, self.device, self.providers, self.profile, rules, self.repeated)

    def of(self, graph: TrainingGraph) -> CandidateTable:
        """The same for another graph of the same mini-batch."""
        return self._like(graph, self.repeated)

    def repeating(self, repeated: Mapping[str, Repeaters]) -> CandidateTable:
        """The same with recomputed convolutions."""
        return self if repeated == self.repeated else self._like(self.graph, repeated)

    def _like(self, graph: TrainingGraph, repeated: Mapping[str, Repeaters]) -> CandidateTable:
        """With the same answers to equal requests."""
        assert graph.batch == self.graph.batch
        made = CandidateTable(graph, self.device, self.providers, self.profile, self.rules, repeated)
        made._known, made._of_parts = self._known, self._of_parts
        made._menus, made._divided = self._menus, self._divided
        made._conversions = self._conversions
        return made

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
        """Every admitted candidate: those of the profile, measured or between measured sizes, else estimates.

        An optimistic estimate must not beat a fact: beside a profile's candidates only those are estimated that need
        less workspace than all of them, and none as faster. MBC200 and MBC202 where there is none.
        """
        request = self.request(operation, rows)
        known = self._offered(operation, request)
        if not known:
            raise no_candidate(self.rules, self.providers, self.device, operation, request)
        return known

    def candidates_of_part(self, operation: Operation, rows: Rows) -> tuple[Candidate, ...]:
        """The same of a micro-batch that is not held beside the whole, and with what larger sizes tell of it: of
        kernels that were not measured at so few rows. MBC200 and MBC202 as before."""
        if self.larger is None or rows.count >= self.graph.batch:
            return self.candidates(operation, rows)
        request = self.request(operation, rows)
        key = request, self._repeaters(operation)
        known = self._of_parts.get(key)
        if known is None:
            known = self._of_parts[key] = tuple(_with_plain_layouts(c, request) for c in self._find_part(*key))
        if not known:
            raise no_candidate(self.rules, self.providers, self.device, operation, request)
        return known

    def offered(self, operation: Operation) -> tuple[Candidate, ...]:
        """`candidates` for the whole mini-batch, none where there is none: fused groups need not have any."""
        key = "offered", operation.name, operation.outputs
        known = self._named.get(key)
        if known is None:
            known = self._named[key] = self._offered(operation, self.request(operation, self.whole))
        return known

    def timed(self, operation: Operation) -> bool:
        """Whether the profile has times of admitted kernels for the whole mini-batch: measured, between measured sizes,
        or of an earlier version of the kernel."""
        key = "timed", operation.name, operation.outputs
        known = self._named.get(key)
        if known is None:
            found = self.profile.candidates(self.request(operation, self.whole)) if self.profile else ()
            known = self._named[key] = bool(self._admitted(found, self._repeaters(operation)))
        return known

    def _offered(self, operation: Operation, request: Request) -> tuple[Candidate, ...]:
        if 0 < self.rules.micro_batch < self.graph.batch and _holds_convolution(operation):
            return ()  # a group runs all rows at once
        key = request, self._repeaters(operation)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = tuple(_with_plain_layouts(c, request) for c in self._find(*key))
        return known

    def _repeaters(self, operation: Operation) -> Repeaters:
        """Kernels that recompute the outputs of an operation or group."""
        makes = operation.kind in ("convolution", WITH_STATISTICS)
        return self.repeated.get(names_of(operation)[0], Repeaters()) if makes else Repeaters()

    @cached_property
    def larger(self) -> LargerSizes | None:
        """What a profile tells beyond the sizes that it has."""
        return LargerSizes(self.profile, self.providers, self.device) if self.profile else None

    def _find(self, request: Request, repeaters: Repeaters) -> tuple[Candidate, ...]:
        known = self.profile.candidates(request) if self.profile else ()
        return self._with_leaner(self._admitted(known, repeaters), request, repeaters)

    def _find_part(self, request: Request, repeaters: Repeaters) -> tuple[Candidate, ...]:
        assert self.profile is not None and self.larger is not None
        known = self._admitted(self.profile.candidates(request), repeaters)
        told = self._admitted(self.larger.candidates(request), repeaters)
        if not known:
            return self._with_leaner(told, request, repeaters)
        return (*told, *self._with_leaner(known, request, repeaters))

    def _with_leaner(
        self, known: tuple[Candidate, ...], request: Request, repeaters: Repeaters
    ) -> tuple[Candidate, ...]:
        """What a profile tells, and estimates of what needs less workspace; without a profile's all estimates."""
        admitted = self._admitted(self._estimated(request), repeaters)
        # A group's operations are there by themselves where what was measured of it needs too much workspace.
        if not known or isinstance(request.attributes, Fused):
            return known or admitted
        least_bytes = min(c.workspace_bytes for c in known)
        slowest_us = max(c.time_us for c in known)
        leaner = (replace(c, time_us=max(c.time_us, slowest_us)) for c in admitted if c.workspace_bytes < least_bytes)
        return (*known, *leaner)

    def _estimated(self, request: Request) -> tuple[Candidate, ...]:
        named = [p for p in self.providers if not self.rules.providers or p.name in self.rules.providers]
        return tuple(c for p in named for c in p.candidates(request, self.device))

    def _admitted(self, candidates: tuple[Candidate, ...], repeaters: Repeaters) -> tuple[Candidate, ...]:
        admitted = (c for c in candidates if self.rules.admit(c, self.graph.precision))
        return tuple(c for c in admitted if all(bitwise_equal_to(kernel, c.name) for kernel in repeaters))

    def slice_rows(self, operation: Operation) -> tuple[int, ...]:
        """Rows that a kernel call of the operation may work on, largest first: all of them, and what the policy and
        alignment leave of smaller ones. A mini-batch of many rows is divided in steps of several, so that what is
        searched does not grow with it."""
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
        """Of the operations that could be divided only convolutions gain by it."""
        return kind_of(operation).divisible and isinstance(operation.attributes, Convolution)

    def _aligned(self, operation: Operation, rows: int) -> bool:
        return rows % self.aligned_rows(operation) == 0

    def aligned_rows(self, operation: Operation) -> int:
        """Slices of multiples of so many rows start at addresses that kernels can take, in every operand."""
        values = (self.graph.values[name] for name in (*operation.inputs, *operation.outputs))
        row_bytes = (v.type.size_bytes // self.graph.batch for v in values if v.per_sample)
        return math.lcm(*(SLICE_ALIGNMENT_BYTES // math.gcd(SLICE_ALIGNMENT_BYTES, size) for size in row_bytes))

    def menus(self, operation: Operation) -> Menus:
        """Per combination of layouts the divisions of the operation; never empty."""
        key = "menus", operation.name, operation.outputs
        known = self._named.get(key)
        if known is None:
            asked = self.request(operation, self.whole), self._repeaters(operation)
            known = self._menus.get(asked)
            if known is None:
                known = self._menus[asked] = self._make_menus(operation)
            self._named[key] = known
        return known

    def menus_in(self, operation: Operation, rows: int) -> Menus:
        """As `menus`, all of it in micro-batches of so many rows (the last may be smaller); empty where that cannot
        be."""
        key = self.request(operation, Rows(0, rows)), self._repeaters(operation)
        known = self._divided.get(key)
        if known is None:
            known = self._divided[key] = self._make_menus_in(operation, rows)
        return known

    def _make_menus_in(self, operation: Operation, rows: int) -> Menus:
        division = self._parts(rows)
        if not kind_of(operation).divisible or not self._aligned(operation, rows):
            return {}
        offers: dict[tuple[Layout, ...], dict[int, list[Candidate]]] = {}
        for count in dict.fromkeys(division):
            for candidate in self.candidates_of_part(operation, Rows(0, count)):
                offers.setdefault(candidate.layouts, {}).setdefault(count, []).append(candidate)
        sums = kind_of(operation).accumulates
        menus = {layouts: fixed(found, division, sums) for layouts, found in offers.items()}
        return {layouts: front for layouts, front in menus.items() if front}

    def _make_menus(self, operation: Operation) -> Menus:
        sums = kind_of(operation).accumulates
        division = self._forced(operation)
        sizes = division or self.slice_rows(operation)
        offers: dict[tuple[Layout, ...], dict[int, list[Candidate]]] = {}
        measured = True
        for rows in dict.fromkeys(sizes):
            if division:  # given sizes run by whatever is known of them
                found = self.candidates_of_part(operation, Rows(0, rows))
            elif rows == sizes[0]:
                found = self.candidates_of_part(operation, Rows(0, rows))
                measured = any(c.measured for c in found)
            elif measured and self.profile is not None:
                # A size that profiling left out is no use: estimates would stand beside measurements.
                request = self.request(operation, Rows(0, rows))
                found = self._admitted(self.profile.candidates(request), self._repeaters(operation))
                found = tuple(_with_plain_layouts(c, request) for c in found)
            elif self.timed(operation):
                found = self.candidates_of_part(operation, Rows(0, rows))
            else:  # beside an estimate only facts and estimates
                found = self.candidates(operation, Rows(0, rows))
            for candidate in found:
                offers.setdefault(candidate.layouts, {}).setdefault(rows, []).append(candidate)
        menus = {
            layouts: fixed(found, division, sums) if division else self._menu(found, sums)
            for layouts, found in offers.items()
        }
        menus = {layouts: front for layouts, front in menus.items() if front}
        if menus:
            return menus
        # Where no kernel can add up forced slices, or none runs them all in one layout, the operation stays whole.
        warnings.warn(
            f"--micro-batch {self.rules.micro_batch}: '{operation.name}' stays whole, for want of a kernel that adds "
            "up the results of slices, or that runs all of them in one layout",
            RuntimeWarning,
            stacklevel=2,
        )
        whole = self.candidates(operation, self.whole)
        alike = {c.layouts: [o for o in whole if o.layouts == c.layouts] for c in whole}
        return {layouts: menu({self.graph.batch: found}, self.graph.batch, sums) for layouts, found in alike.items()}

    def _menu(self, offers: Mapping[int, Sequence[Candidate]], sums: bool) -> Menu:
        batch = self.graph.batch
        front = menu(offers, batch, sums)
        if len(offers) == 1:
            return front
        return worthwhile(front, menu({batch: offers.get(batch, ())}, batch, sums))

    def _forced(self, operation: Operation) -> tuple[int, ...]:
        rows = self.rules.micro_batch
        if not rows or not self.divisible(operation) or not self._aligned(operation, rows):
            return ()
        return self._parts(rows)

    def _parts(self, rows: int) -> tuple[int, ...]:
        full, rest = divmod(self.graph.batch, rows)
        return (rows,) * full + ((rest,) if rest else ())

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


def least_workspace_bytes(menus: Mapping[tuple[Layout, ...], Menu]) -> int:
    """Of the candidate that needs least, in any layouts."""
    return min(front[0].workspace_bytes for front in menus.values())


def _with_plain_layouts(candidate: Candidate, request: Request) -> Candidate:
    """Operands whose layout does not matter are CHANNELS_FIRST, so that nothing is converted for their sake."""
    types = (*request.inputs, *request.outputs)
    layouts = tuple(
        layout if layout_matters(type_.shape) else Layout.CHANNELS_FIRST
        for layout, type_ in zip(candidate.layouts, types, strict=True)
    )
    return candidate if layouts == candidate.layouts else replace(candidate, layouts=layouts)
