"""What a compilation measures before it plans, on a machine that has the GPU that it plans for (`--measure`).

Measurements go into the user's own profile, so that the next plan finds them.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from mbc.codegen.toolchain import find_toolchain
from mbc.errors import MbcError
from mbc.hardware.part import split_name
from mbc.hardware.spec import DeviceSpec
from mbc.ir.graph import TrainingGraph
from mbc.kernels.base import Request
from mbc.measure.fleet import Outcome, Progress, Task, gpus_named, measure_on
from mbc.measure.need import MOST_WORKSPACE_BYTES, Need
from mbc.options import Measure, Options, Policy
from mbc.profile.locate import find_profile, own_path
from mbc.profile.model import Profile
from mbc.profile.signature import described, rows_of, signature
from mbc.units import show_duration

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """`new`: something was measured; `complete`: nothing that can be is left."""

    new: bool = False
    complete: bool = True


def _silent(text: str) -> None:
    pass


def measure_missing(
    graph: TrainingGraph, device: DeviceSpec, policy: Policy, options: Options, say: Say = _silent
) -> Measured:
    """Measure what plans of `graph` under `policy` would like to know and no profile of `device` says; nothing where
    this machine cannot, or `options` do not want it. `say` is told what is going on.

    A warning (RuntimeWarning) says what was not measured after all: it is estimated. Raises MBC089 where measuring is
    wanted in any case and cannot be, and what measuring raises.
    """
    obstacle = _obstacle(device, options)
    if obstacle is None:
        from mbc.optimize.search.profiling_requests import needs

        return _measure(needs(graph, device, policy), device, options, say)
    if options.measure is Measure.ALWAYS:
        raise MbcError(
            "MBC089",
            f"cannot measure for {device.name}: {obstacle}",
            "leave out --measure always, or compile on a machine that has the GPU; `mbc doctor` says what is missing",
        )
    return Measured()


def measure_requests(requests: Iterable[Request], device: DeviceSpec, options: Options, say: Say = _silent) -> bool:
    """Measure what is missing of just these, such as those that were chosen by interpolated times. Whether planning
    again makes sense: all that could be measured was, and something was. Otherwise as `measure_missing`."""
    if not can_measure(device, options):
        return False
    needs = [Need((request,), 0.0) for request in dict.fromkeys(requests)]
    found = _measure(needs, device, replace(options, measure=Measure.MISSING), say)
    return found.new and found.complete


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
    from mbc.measure.ladder import Ladder

    found: list[Need] = []
    for need in needs:
        ladder = Ladder()
        lacking: list[Request] = []
        for place, request in enumerate(need.requests):
            key = signature(request)
            extent = profile.extents.get(key)
            if extent is not None and extent.covers(workspace_limit_bytes, whole=need.whole and not place):
                ladder.add(rows_of(request), profile.measurements.get(key, ()))
            elif ladder.closed:
                break
            else:
                lacking.append(request)
        if lacking:
            found.append(Need(tuple(lacking), need.weight_us, need.whole and lacking[0] is need.requests[0]))
    return tuple(found)


def _measure(needs: Sequence[Need], device: DeviceSpec, options: Options, say: Say) -> Measured:
    limit_bytes = MOST_WORKSPACE_BYTES if options.workspace_limit_bytes is None else options.workspace_limit_bytes
    again = options.measure is Measure.ALWAYS
    path = own_path(device.name)
    wanted = tuple(needs) if again else missing(needs, find_profile(device), limit_bytes)
    if not wanted:
        return Measured()
    say("starting to measure")
    _, multiprocessors = split_name(device.name)
    task = Task(wanted, path, options.measure_for_s, limit_bytes, again, multiprocessors=multiprocessors)
    outcome = measure_on(gpus_named(device.name)[:1], task, lambda now: say(progress_text(now)))
    for note in shortcomings(outcome):
        warnings.warn(note, RuntimeWarning, stacklevel=3)
    return Measured(outcome.summary is not None and outcome.summary.measured > 0, not outcome.left)


def progress_text(now: Progress) -> str:
    """`measuring 12 of 80, 2 min 5 s left: convolution fp32 …`"""
    left = "" if now.left_s is None else f", {show_duration(now.left_s)} left"
    return f"measuring {now.done} of {now.total}{left}: {described(now.request)}"


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
