"""Measures what a compilation needs before it plans, on a machine with the GPU of the plan (`--measure`).

Measurements go into the user's own profile, so that the next plan uses them.
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
from mbc.measure.fleet import Outcome, Progress, Task, gpus_named, measure_on, sharing_notes
from mbc.measure.need import MOST_WORKSPACE_BYTES, Measured, Need
from mbc.optimize.candidates.user_rules import Rules
from mbc.options import UNLIMITED_BYTES, Measure, Options, Policy
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
    """The measurements of one compilation, step by step, within `options.measure_for_s` in all.

    Nothing is measured if this machine cannot, or if `options` switch it off. A RuntimeWarning reports what was not
    measured; it is estimated. Each step raises the errors of measuring.
    """

    def __init__(
        self, graph: TrainingGraph, device: DeviceSpec, rules: Rules, options: Options, say: Say = _silent
    ) -> None:
        """Prepare to measure for `graph` on `device`; `say` receives lines of progress."""
        self._graph, self._device, self._rules, self._options, self._say = graph, device, rules, options, say
        # If operations have to be divided, their micro-batches are measured at once.
        at_once = options.measure is Measure.ALWAYS or rules.micro_batch
        self._first = rules.policy if at_once else Policy.UNDIVIDED
        self._decides = not at_once  # choose the requests that can decide the plan
        self._over = False  # interrupted, or out of time
        self._left_s = options.measure_for_s
        self._completed: set[Request] = set()  # outdated requests that were measured again
        self.has_more = False  # there are requests that `begin` did not measure

    def begin(self) -> None:
        """Measure the undivided requests that no profile of the GPU has: most of those that decide a plan.

        Raises:
            MbcError: MBC089, `options` demand measuring, but it is not possible.
        """
        obstacle = _obstacle(self._device, self._options)
        if obstacle is None:
            self._measure(self._needs(self._first), self._decisive() if self._decides else None)
            self.has_more = self._first is not self._rules.policy and not self._over
        elif self._options.measure is Measure.ALWAYS:
            raise MbcError(
                "MBC089",
                f"cannot measure for {self._device.name}: {obstacle}",
                "leave out --measure always, or compile on a machine that has the GPU; "
                "`mbc doctor` lists what is missing",
            )

    def micro_batches(self) -> bool:
        """Measure the micro-batches too, and return whether anything was measured, so that a new plan may differ."""
        self.has_more = False
        return self._measure(self._needs(self._rules.policy))

    def chosen(self, requests: Iterable[Request], outdated: Iterable[Request] = ()) -> bool:
        """Measure what is missing of given requests, and return whether to plan again.

        This is true if something could be measured, and all of it was measured.

        Args:
            requests: Requests such as those that a plan chose by interpolated times.
            outdated: Requests that are completed because a kernel was added later.
        """
        if not can_measure(self._device, self._options):
            return False
        # Each only once: if a clock is wrong, a request that was just completed may seem older than the rest.
        old = [one for one in dict.fromkeys(outdated) if one not in self._completed]
        self._completed.update(old)
        lacking, incomplete = ([Need((one,), 0.0) for one in dict.fromkeys(measured)] for measured in (requests, old))
        measured = self._measure(lacking, again=False)
        return (self._measure(incomplete, again=False, outdated=True) or measured) and not self._over

    def _decisive(self) -> Decide:
        from mbc.optimize.search.decisive_requests import Decisive

        return Decisive(self._graph, self._device, self._rules)

    def _needs(self, policy: Policy) -> Sequence[Need]:
        from mbc.optimize.search.profiling_requests import needs

        return needs(self._graph, self._device, policy)

    def _measure(
        self, needs: Sequence[Need], decide: Decide | None = None, again: bool = True, outdated: bool = False
    ) -> bool:
        """Measure `needs`, and return whether anything was measured.

        `again`: measure all of it again if `options` ask for it. `outdated`: add missing kernels to requests in the
        profile.
        """
        device, limit_bytes = self._device, self._options.workspace_limit_bytes
        limit_bytes = MOST_WORKSPACE_BYTES if limit_bytes >= UNLIMITED_BYTES else limit_bytes
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
        name = split_name(device.name)
        task = Task(
            wanted, path, self._left_s, limit_bytes, again,
            multiprocessors=name.multiprocessors, pose=name.pose, decide=decide, decision=decision,
            outdated=frozenset(signature(need.undivided) for need in wanted) if outdated else frozenset(),
        )  # fmt: skip
        began_s = time.monotonic()
        gpus = gpus_named(device.name)[:1]
        shared = sharing_notes(gpus)
        outcome = measure_on(gpus, task, lambda now: self._say(progress_text(now)))
        self._left_s = max(0.0, self._left_s - (time.monotonic() - began_s))
        self._over = outcome.interrupted or bool(outcome.left)
        for note in (*shared, *shortcomings(outcome)):
            warnings.warn(note, RuntimeWarning, stacklevel=4)
        return outcome.summary is not None and outcome.summary.measured > 0


def can_measure(device: DeviceSpec, options: Options) -> bool:
    """Return whether measuring is switched on and possible here; a profile that was named is used unchanged."""
    return _obstacle(device, options) is None


def _obstacle(device: DeviceSpec, options: Options) -> str | None:
    if options.measure is Measure.NEVER:
        return "it is switched off"
    if options.profile is not None:
        return "a profile that was named is used unchanged"
    if not gpus_named(device.name):
        return "this machine has no such GPU"
    if importlib.util.find_spec("pycuda") is None:
        return "PyCUDA is not installed"
    return "nvcc was not found" if find_toolchain().nvcc is None else None


def missing(needs: Sequence[Need], profile: Profile | None, workspace_limit_bytes: int) -> tuple[Need, ...]:
    """Return the part of `needs` that the profile lacks, up to the limit of workspace.

    Sizes so small that no division gains from them do not count.
    """
    if profile is None:
        return tuple(needs)
    # What planning knows of a request and what measuring has to do with it part ways here only.
    from mbc.measure.size_ladder import Ladder

    lacking_needs: list[Need] = []
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
            lacking_needs.append(Need(tuple(lacking), need.weight_us, whole, tuple(larger)))
    return tuple(lacking_needs)


def progress_text(now: Progress) -> str:
    """Return a line of progress.

    For example: `measuring 12 of 80, 20 s left (a step of 24.1 ms or more, 28 % of it to be measured): convolution ...`
    """
    left = "" if now.left_s is None else f", {show_duration(now.left_s)} left"
    so_far = ""
    if now.decision is not None:
        least, share = show_time(now.decision.step_us), now.decision.missing_share
        so_far = f" (a step of {least} or more, {share:.0%} of it to be measured)"
    return f"measuring {now.done} of {now.total}{left}{so_far}: {described(now.request)}"


def shortcomings(outcome: Outcome) -> tuple[str, ...]:
    """Return sentences on the measurements that failed or are missing; none if all succeeded."""
    sentences: list[str] = []
    if outcome.left:
        why = "measuring was interrupted" if outcome.interrupted else "the time for measuring is over"
        sentences.append(f"{why}: {outcome.left} operations are not measured, and estimated where a plan needs them")
    summary = outcome.summary
    if summary is not None:
        if summary.failures:
            first = summary.failures[0].splitlines()[0]
            sentences.append(f"{len(summary.failures)} operations could not be measured; the first: {first}")
        if summary.link_failure:
            why = summary.link_failure.splitlines()[0]
            sentences.append(f"copies between GPU and host could not be measured, and are estimated: {why}")
        if summary.warning:
            sentences.append(summary.warning)
    return tuple(sentences)
