"""What to measure next: the requests that can decide a plan.

Most launches that could run a step are in none of its plans: operations that fusion replaces, and fusion groups that
overlap with better ones. So the step is planned with optimism: what was not measured takes a share of its estimate
(`effort.OPTIMISM`) and counts as measured. What such a plan does not choose is slower by an estimate, one that is too
low for nine in ten, than what it chooses. That is measured, and the step planned again, until all that it chooses is
measured, but for a share of its time that is not worth more (`effort.UNDECIDED_SHARE`). This is optimism in the face of
uncertainty, as in branch and bound.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from mbc.hardware.spec import DeviceSpec
from mbc.ir.graph import Operation, TrainingGraph
from mbc.ir.transforms.relu_masks import mask_relus, residual_relus
from mbc.ir.types import Layout
from mbc.kernels import PROVIDERS
from mbc.kernels.base import Request
from mbc.measure.need import Decision
from mbc.optimize import effort
from mbc.optimize.candidates.table import CandidateTable, conversion_request
from mbc.optimize.candidates.user_rules import Rules
from mbc.optimize.fusion.bitwise_remat_match import with_bitwise_remat
from mbc.optimize.fusion.select_groups import fuse
from mbc.optimize.selection.select import Choices, choose
from mbc.profile.locate import find_profile
from mbc.profile.model import Extent, Identity, Profile, calibrated
from mbc.profile.signature import signature


@dataclass(frozen=True)
class Decisive:
    """Finds them for one training step, without a budget. It can be sent to another process."""

    graph: TrainingGraph
    device: DeviceSpec
    rules: Rules

    def __call__(self, identity: Identity, failed: Collection[str], missing: Collection[str]) -> Decision:
        """By what the profiles of this machine, of this identity, hold. Requests by signature: `missing` are not
        measured, and those of the decision are some of these; `failed` could not be."""
        profile = find_profile(self.device) or Profile(identity, {})
        profile = replace(profile, extents={**profile.extents, **dict.fromkeys(failed, Extent(0))})
        table = CandidateTable(
            self.graph, calibrated(self.device, profile), PROVIDERS, profile, self.rules, optimism=effort.OPTIMISM
        )
        masked = table.of(mask_relus(self.graph, residual_relus(self.graph)))
        variants = (variant for one in (table, masked) for variant in (one, with_bitwise_remat(one)))
        steps = [(variant, choose(variant, {}, programs=fuse(variant))) for variant in variants]
        chosen = [_missing_us(variant, choices, missing) for variant, choices in steps]
        requests = {request: None for of_step, _ in chosen for request in of_step}
        fastest_us, share = min(choices.train_us for _, choices in steps), max(share for _, share in chosen)
        return Decision(tuple(requests) if share >= effort.UNDECIDED_SHARE else (), fastest_us, share)


def _missing_us(table: CandidateTable, choices: Choices, missing: Collection[str]) -> tuple[tuple[str, ...], float]:
    """What a step chooses of `missing`, those that take longest first, and their share of the training step."""
    times_us: dict[str, float] = {}
    train_us = 0.0
    for program in (choices.train, choices.infer):
        for request, time_us in _chosen(table, choices, program):
            key = signature(request)
            if key in missing:
                times_us[key] = times_us.get(key, 0.0) + time_us
                train_us += time_us if program is choices.train else 0.0
    return tuple(sorted(times_us, key=lambda key: -times_us[key])), train_us / choices.train_us


def _chosen(table: CandidateTable, choices: Choices, program: Sequence[Operation]) -> Iterator[tuple[Request, float]]:
    """The requests of a program's launches and of the conversions between them, and their times in us."""
    lies: dict[tuple[str, Layout], None] = dict.fromkeys(choices.states.items())
    for operation in program:
        choice = choices.operations.get(operation.name)
        if choice is None:  # a view
            continue
        yield table.request(operation, table.whole), choice.point.time_us
        for name, layout in zip(operation.inputs, choice.layouts, strict=False):
            here = [known for known in Layout if (name, known) in lies] or [Layout.CHANNELS_FIRST]
            if name in table.layouted and layout not in here:
                type_ = table.graph.values[name].type
                lies[name, layout] = None
                yield conversion_request(type_, table.graph), table.conversion_us(type_, layout)
        written = choice.layouts[len(operation.inputs) :]
        lies.update(dict.fromkeys(zip(operation.outputs, written, strict=True)))
