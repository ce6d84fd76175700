"""The requests to measure next: those that can decide a plan.

Most launches that could run a step are in none of its plans: operations that fusion replaces, and fusion groups that
overlap with better ones. So the step is planned with optimism: a time that was not measured counts as measured, at a
share of its estimate (`effort.OPTIMISM`, or `SCALED_OPTIMISM` for a time scaled from a near batch or a similar GPU). A
launch that such a plan does not choose is slower than the chosen one, even by an estimate that is too low in nine cases
of ten. The chosen launches are measured, and the step is planned again, until all chosen launches are measured, except
for a share of the step's time that is too small to matter (`effort.UNDECIDED_SHARE`). This is optimism in the face of
uncertainty, as in branch and bound.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from mbc.hardware.spec import DeviceSpec
from mbc.ir.graph import Operation, TrainingGraph
from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.providers import PROVIDERS
from mbc.measure.need import Decision
from mbc.optimize import effort
from mbc.optimize.candidates.table import CandidateTable, conversion_request
from mbc.optimize.candidates.user_rules import Rules
from mbc.optimize.fusion.bitwise_remat_match import with_bitwise_remat
from mbc.optimize.fusion.select_groups import Fusion
from mbc.optimize.selection.select import Choices
from mbc.optimize.selection.selector import Selector
from mbc.passes.relu_bit_masks import mask_relus, residual_relus
from mbc.profile.locate import find_profile
from mbc.profile.model import Extent, calibrated, unmeasured
from mbc.profile.signature import signature


@dataclass(frozen=True)
class Decisive:
    """Finds the decisive requests of one training step, without a budget. Instances can be sent to another process."""

    graph: TrainingGraph
    device: DeviceSpec
    rules: Rules

    def __call__(self, failed: Collection[str], missing: Collection[str]) -> Decision:
        """Return the requests to measure next, from the profiles of this machine.

        Args:
            failed: Signatures of requests that could not be measured.
            missing: Signatures of requests that are not measured; the result is a part of them.
        """
        profile = find_profile(self.device)
        if profile is not None and profile.stale:
            profile = unmeasured(profile)
        if profile is not None:
            profile = replace(profile, extents={**profile.extents, **dict.fromkeys(failed, Extent(0))})
        table = CandidateTable(
            self.graph, calibrated(self.device, profile), PROVIDERS, profile, self.rules, optimism=effort.OPTIMISM
        )
        masked = table.of(mask_relus(self.graph, residual_relus(self.graph)))
        steps = [_of_step(Selector(with_bitwise_remat(Fusion.of(variant))), missing) for variant in (table, masked)]
        requests = dict.fromkeys(request for step in steps for request in step.requests)
        return replace(min(steps, key=lambda step: step.step_us), requests=tuple(requests))


def _of_step(selector: Selector, missing: Collection[str]) -> Decision:
    """Return the requests in `missing` that the fastest step of a selector takes.

    The shortest ones that together take a negligible share of the step are left out.
    """
    table, choices = selector.table, selector.unlimited
    weights_us: dict[str, float] = {}
    train_us = 0.0
    for program, weight in ((choices.train, 1.0), (choices.infer, effort.INFERENCE_WEIGHT)):
        for request, time_us in _chosen(table, choices, program):
            key = signature(request)
            if key in missing:
                weights_us[key] = weights_us.get(key, 0.0) + weight * time_us
                train_us += time_us if program is choices.train else 0.0
    left_us, threshold_us = sum(weights_us.values()), effort.UNDECIDED_SHARE * choices.train_us
    requests: list[str] = []
    for key in sorted(weights_us, key=lambda key: -weights_us[key]):
        if left_us < threshold_us:
            break
        requests.append(key)
        left_us -= weights_us[key]
    return Decision(tuple(requests), choices.train_us, train_us / choices.train_us)


def _chosen(table: CandidateTable, choices: Choices, program: Sequence[Operation]) -> Iterator[tuple[Request, float]]:
    """Yield the requests of a program's launches and of the conversions between them, with their times in us."""
    available: dict[tuple[str, Layout], None] = dict.fromkeys(choices.states.items())
    for operation in program:
        choice = choices.operations.get(operation.name)
        if choice is None:  # a view
            continue
        yield table.request(operation, table.whole), choice.point.time_us
        for name, layout in zip(operation.inputs, choice.layouts, strict=False):
            layouts = [present for present in Layout if (name, present) in available] or [Layout.CHANNELS_FIRST]
            if name in table.values_with_layout and layout not in layouts:
                type_ = table.graph.values[name].type
                available[name, layout] = None
                yield conversion_request(type_, table.graph), table.conversion_us(type_, layout)
        written = choice.layouts[len(operation.inputs) :]
        available.update(dict.fromkeys(zip(operation.outputs, written, strict=True)))
