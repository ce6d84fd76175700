"""What a compilation measures before it plans, on a machine that has the GPU that it plans for (`--measure`).

Measurements go into the user's own profile, so that the next plan finds them.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from mbc.codegen.toolchain import find_toolchain
from mbc.errors import MbcError
from mbc.hardware.part import split_name
from mbc.hardware.spec import DeviceSpec
from mbc.ir.graph import TrainingGraph
from mbc.kernels.base import Request
from mbc.measure.fleet import Outcome, Progress, Task, gpus_named, measure_on
from mbc.measure.need import MOST_WORKSPACE_BYTES, Measured, Need
from mbc.optimize.candidates.user_rules import Rules
from mbc.options import Measure, Options, Policy
from mbc.profile.locate import find_profile, own_path
from mbc.profile.model import Profile
from mbc.profile.signature import described, rows_of, signature
from mbc.units import show_duration, show_time

if TYPE_CHECKING:
    from mbc.measure.measure import Decide

Say = Callable[[str], None]


def _silent(text: str) -> None:
    pass


class Measuring:
    """What one compilation measures, step by step, in `options.measure_for_s` in all; nothing where this machine
    cannot, or `options` do not want it. `say` is told what is going on.

    A warning (RuntimeWarning) says what was not measured after all: it is estimated. Each step raises what measuring
    raises."""

    def __init__(
        self, graph: TrainingGraph, device: DeviceSpec, rules: Rules, options: Options, say: Say = _silent
    ) -> None:
        self._graph, self._device, self._rules, self._options, self._say = graph, device, rules, options, say
        # Operations that have to be divided are measured as such.
        at_once = options.measure is Measure.ALWAYS or rules.micro_batch
        self._first = rules.policy if at_once else Policy.UNDIVIDED
        self._decides = not at_once  # what is measured of it
        self._over = False  # interrupted, or out of time
        self._left_s = options.measure_for_s
        self._completed: set[Request] = set()  # since a kernel came later
        self.has_more = False  # than what `begin` measured

    def begin(self) -> None:
        """What plans would like to know and no profile of the GPU says, undivided: most of what decides a plan. MBC089
        where measuring is wanted in any case and cannot be."""
        obstacle = _obstacle(self._device, self._options)
        if obstacle is None:
            self._measure(self._needs(self._first), self._decisive() if self._decides else None)
            self.has_more = self._first is not self._rules.policy and not self._over
        elif self._options.measure is Measure.ALWAYS:
            raise MbcError(
                "MBC089",
                f"cannot measure for {self._device.name}: {obstacle}",
                "leave out --measure always, or compile on a machine that has the GPU; "
                "`mbc doctor` says what is missing",
            )

    def micro_batches(self) -> bool:
        """The micro-batches as well. Whether planning again makes sense: something was measured."""
        self.has_more = False
        return self._measure(self._needs(self._rules.policy))

    def chosen(self, requests: Iterable[Request], outdated: Iterable[Request] = ()) -> bool:
        """What is missing of just these, such as those that were chosen by interpolated times, and of those that are
        `outdated`, since a kernel came later. Whether planning again makes sense: all that could be measured was, and
        something was."""
        if not can_measure(self._device, self._options):
            return False
        # Once: where a clock is wrong, what was just completed may seem to be older than the rest.
        old = [one for one in dict.fromkeys(outdated) if one not in self._completed]
        self._completed.update(old)
        lacking, incomplete = ([Need((one,), 0.0) for one in dict.fromkeys(found)] for found in (requests, old))
        found = self._measure(lacking, again=False)
        return (self._measure(incomplete, again=False, outdated=True) or found) and not self._over

    def _decisive(self) -> Decide:
        from mbc.optimize.search.decisive_requests import Decisive

        return Decisive(self._graph, self._device, self._rules)

    def _needs(self, policy: Policy) -> Sequence[Need]:
        from mbc.optimize.search.profiling_requests import needs

        return needs(self._graph, self._device, policy)

    def _measure(
        self, needs: Sequence[Need], decide: Decide | None = None, again: bool = True, outdated: bool = False
    ) -> bool:
        """Whether anything was measured. `again`: all of it anew where `options` say so. `outdated`: what the profile
        knows of it is completed."""
        device, limit_bytes = self._device, self._options.workspace_limit_bytes
        limit_bytes = MOST_WORKSPACE_BYTES if limit_bytes is None else limit_bytes
        again = again and self._options.measure is Measure.ALWAYS
        path = own_path(device.name)
        profile = find_profile(device)
        if profile is not None and profile.stale:  # another GPU's
            profile = None
        wanted = tuple(needs) if again or outdated else missing(needs, profile, limit_bytes)
        if not wanted or self._over:
            return False
        decision = None
        if decide is not None:
            decision = decide((), {signature(need.undivided) for need in wanted})
            if not decision.requests:
                return False
        self._say("starting to measure")
        _, multiprocessors = split_name(device.name)
        task = Task(
            wanted, path, self._left_s, limit_bytes, again,
            multiprocessors=multiprocessors, decide=decide, decision=decision,
            outdated=frozenset(signature(need.undivided) for need in wanted) if outdated else frozenset(),
        )  # fmt: skip
        began_s = time.monotonic()
        outcome = measure_on(gpus_named(device.name)[:1], task, lambda now: self._say(progress_text(now)))
        self._left_s = max(0.0, self._left_s - (time.monotonic() - began_s))
        self._over = outcome.interrupted or bool(outcome.left)
        for note in shortcomings(outcome):
            warnings.warn(note, RuntimeWarning, stacklevel=4)
        return outcome.summary is not None and outcome.summary.measured > 0


def can_measure(device: DeviceSpec, options: Options) -> bool:
    """Whether measuring is wanted, and `device` and what measuring needs are here. A profile that was named is used as
    it is."""
    return _obstacle(device, options) is None


def _obstacle(device: DeviceSpec, options: Options) -> str | None:
    if options.measure is Measure.NEVER:
        return "it is switched off"
    if options.profile is not None:
        return "a profile that was named is used as it is"
    if not gpus_named(device.name):
        return "this machine has no such GPU"
    if importlib.util.find_spec("pycuda") is None:
        return "PyCUDA is not installed"
    return "nvcc was not found" if find_toolchain().nvcc is None else None


def missing(needs: Sequence[Need], profile: Profile | None, workspace_limit_bytes: int) -> tuple[Need, ...]:
    """What of `needs` the profile does not know up to the limit of workspace. Sizes so small that no division gains by
    them are not missed."""
    if profile is None:
        return tuple(needs)
    # What planning knows of a request and what measuring has to do with it part ways here only.
    from mbc.measure.size_ladder import Ladder

    found: list[Need] = []
    for need in needs:
        ladder = Ladder()
        lacking: list[Request] = []
        larger: list[Measured] = []
        for place, request in enumerate(need.requests):
            key = signature(request)
            extent = profile.extents.get(key)
            if extent is not None and extent.covers(workspace_limit_bytes, whole=need.whole and not place):
                larger.append((rows_of(request), profile.measurements.get(key, ())))
                ladder.add(*larger[-1])
            elif ladder.closed:
                break
            else:
                lacking.append(request)
        if lacking:
            whole = need.whole and lacking[0] is need.requests[0]
            found.append(Need(tuple(lacking), need.weight_us, whole, tuple(larger)))
    return tuple(found)


def progress_text(now: Progress) -> str:
    """`measuring 12 of 80, 20 s left (a step of 24.1 ms or more, 28 % of it to be measured): convolution fp32 …`"""
    left = "" if now.left_s is None else f", {show_duration(now.left_s)} left"
    so_far = ""
    if now.decision is not None:
        least, share = show_time(now.decision.step_us), now.decision.missing_share
        so_far = f" (a step of {least} or more, {share:.0%} of it to be measured)"
    return f"measuring {now.done} of {now.total}{left}{so_far}: {described(now.request)}"


def shortcomings(outcome: Outcome) -> tuple[str, ...]:
    """What a user should know of the measurements, in sentences; none where all went well."""
    found: list[str] = []
    if outcome.left:
        why = "measuring was interrupted" if outcome.interrupted else "the time for measuring is over"
        found.append(f"{why}: {outcome.left} operations are not measured, and estimated where a plan needs them")
    summary = outcome.summary
    if summary is not None:
        if summary.failures:
            first = summary.failures[0].splitlines()[0]
            found.append(f"{len(summary.failures)} operations could not be measured; the first: {first}")
        if summary.link_failure:
            why = summary.link_failure.splitlines()[0]
            found.append(f"copies between GPU and host could not be measured, and are estimated: {why}")
        if summary.warning:
            found.append(summary.warning)
    return tuple(found)
