"""The concurrent stream: a second stream of kernels, for launches that leave most of the GPU idle and have slack.

With a small batch most multiprocessors are idle, and a gradient of a parameter is read at the end of the step only. So
it can be computed concurrently with the launches that propagate the gradient. `synchronise` orders accesses to shared
bytes, as it does for copies; this module selects the launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from mbc.hardware.streams import Stream
from mbc.optimize import effort
from mbc.optimize.placement.assign_addresses import assign_addresses
from mbc.optimize.schedule.contention import contention
from mbc.optimize.schedule.cross_stream_liveness import data_waits_only
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.liveness import owners
from mbc.optimize.schedule.simulate import simulate
from mbc.optimize.schedule.split_updates import divisible_us, split_into
from mbc.optimize.search.solution import Solution
from mbc.plan.model import Buffer, Mode, Program


def use_concurrent_stream(serial: Solution, available_bytes: int) -> Solution:
    """Return the step with some launches of its training program on the concurrent stream, or `serial` unchanged.

    The step changes only where it is predicted to be faster, takes little more memory, and fits.

    Args:
        serial: The step on one stream of kernels.
        available_bytes: Bytes of the arena that the step may use.
    """
    table = serial.table
    available_bytes = min(available_bytes, int(effort.CONCURRENT_MAX_ARENA * serial.placed.arena_bytes))
    best, best_us = serial.draft, effort.CONCURRENT_MAX_TIME * serial.step_us
    for draft in _drafts(serial):
        slack_us = _slack_us(draft.train, draft.buffers)
        tried: set[frozenset[int]] = set()
        for least_us in effort.CONCURRENT_MIN_US:
            moved = frozenset(
                i
                for i, launch in enumerate(draft.train.launches)
                if launch.stream is Stream.COMPUTE
                and least_us <= launch.work.time_us <= min(slack_us[i], effort.CONCURRENT_MAX_US)
            )
            if not moved or moved in tried:
                continue
            tried.add(moved)
            # The time is predicted without addresses: placement takes longest.
            concurrent = _moved(draft, moved)
            train = data_waits_only(concurrent.train, concurrent.buffers, owners(concurrent.buffers))
            step_us = simulate(train, contention=contention(train, table.graph, concurrent.buffers, table.device))
            if step_us < best_us:
                best, best_us = concurrent, step_us
    if best is serial.draft:
        return serial
    placed = assign_addresses(best, available_bytes)
    solution = Solution(best, placed, serial.selector)
    faster = solution.step_us <= effort.CONCURRENT_MAX_TIME * serial.step_us
    return solution if faster and placed.arena_bytes <= available_bytes else serial


def _drafts(serial: Solution) -> Iterator[Draft]:
    """Yield the draft unchanged, and with split updates where these could save enough."""
    yield serial.draft
    if divisible_us(serial.draft, serial.table) > (1 - effort.CONCURRENT_MAX_TIME) * serial.step_us:
        for count in effort.UPDATE_SPLITS:
            yield split_into(serial.draft, count, serial.table)


def _moved(draft: Draft, moved: frozenset[int]) -> Draft:
    """Return the draft with these launches on the concurrent stream."""
    launches = tuple(
        replace(launch, stream=Stream.CONCURRENT) if i in moved else launch
        for i, launch in enumerate(draft.train.launches)
    )
    return replace(draft, train=replace(draft.train, launches=launches))


def _slack_us(program: Program, buffers: Sequence[Buffer]) -> list[float]:
    """Return the slack of each launch in the serial schedule.

    The slack is the time from the launch's end until its outputs are first touched or its operands first overwritten.
    """
    launches = program.launches
    times_us = [launch.work.time_us if launch.stream is Stream.COMPUTE else 0.0 for launch in launches]
    starts_us = [0.0, *accumulate(times_us)]
    return [starts_us[needed] - starts_us[i + 1] for i, needed in enumerate(_needed(program, buffers))]


def _needed(program: Program, buffers: Sequence[Buffer]) -> list[int]:
    """Return for each launch the next one that depends on it, or the number of launches."""
    count = len(program.launches)
    owner = owners(buffers)
    needed = [count] * count
    # For each owner of bytes, from the end: the next launch that touches them, and the next that writes them.
    touched: dict[int, int] = {}
    written: dict[int, int] = {}
    for i in reversed(range(count)):
        accesses = program.launches[i].accesses
        for access in accesses:
            nexts = written if access.mode is Mode.READ else touched
            needed[i] = min(needed[i], nexts.get(owner[access.buffer], count))
        for access in accesses:
            touched[owner[access.buffer]] = i
            if access.mode is not Mode.READ:
                written[owner[access.buffer]] = i
    return needed
