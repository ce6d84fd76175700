"""A second stream of kernels, for launches that leave most of the GPU idle and whose results are not needed soon.

A small batch leaves most multiprocessors without work, and a gradient of a parameter is read at the end of the step
only: it can be computed beside the launches that hand the gradient on. Which bytes are shared says `synchronise`, so
that addresses and waits stay what they are for copies; here is said which launches go, and how long what they touch
has to last for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from mbc.device.spec import DeviceSpec
from mbc.ir.graph import TrainingGraph
from mbc.optimize.addresses import Placed, assign_addresses
from mbc.optimize.contention import contention, fills
from mbc.optimize.lifetimes import owners
from mbc.optimize.order import Draft
from mbc.optimize.simulate import simulate
from mbc.optimize.synchronise import synchronise
from mbc.plan.model import Buffer, Mode, Program, Stream

MOST_FILLED = 0.5  # of the GPU, by a launch that goes beside others
WORTH = 0.97  # of the step one after the other: a wait between streams costs a little, too
WAIT_LAUNCHES = 2.0  # gaps between launches that a launch must outlast to be worth a wait


def beside(
    graph: TrainingGraph, device: DeviceSpec, draft: Draft, placed: Placed, room_bytes: int
) -> tuple[Draft, Placed]:
    """The draft with launches of its training program beside others, where that is faster by prediction and fits in
    `room_bytes`; else what was given."""
    moved = _moved(draft.train, draft.buffers, fills(draft.train, graph, draft.buffers, device), device.launch_us)
    if not moved:
        return draft, placed

    def step_us(found: Draft, addresses: Placed) -> float:
        train = replace(found.train, waits=synchronise(found.train, found.buffers, addresses.offsets))
        return simulate(train, contention=contention(train, graph, found.buffers, device))

    launches = tuple(
        replace(launch, stream=Stream.BESIDE) if i in moved else launch for i, launch in enumerate(draft.train.launches)
    )
    found = replace(draft, train=replace(draft.train, launches=launches))
    # What is alive at once is counted as the launches are listed: the rest is what this way of running them costs.
    addresses = replace(assign_addresses(found, room_bytes), live_bytes=placed.live_bytes)
    if addresses.arena_bytes > room_bytes or step_us(found, addresses) > WORTH * step_us(draft, placed):
        return draft, placed
    return found, addresses


def _moved(program: Program, buffers: Sequence[Buffer], filled: Sequence[float], launch_us: float) -> frozenset[int]:
    """Launches of the compute stream that fill little of the GPU, and have ended, if they begin when those before them
    have, before anything touches what they write or overwrites what they read."""
    launches = program.launches
    times_us = [launch.work.time_us if launch.stream is Stream.COMPUTE else 0.0 for launch in launches]
    starts_us = [0.0, *accumulate(times_us)]
    needed = _needed(program, buffers)
    return frozenset(
        i
        for i, launch in enumerate(launches)
        if launch.stream is Stream.COMPUTE
        and filled[i] <= MOST_FILLED
        and times_us[i] > WAIT_LAUNCHES * launch_us
        and starts_us[needed[i]] - starts_us[i + 1] >= times_us[i]
    )


def _needed(program: Program, buffers: Sequence[Buffer]) -> list[int]:
    """For each launch the next one that has to wait for it, or the number of launches."""
    count = len(program.launches)
    owner = owners(buffers)
    needed = [count] * count
    # By bytes, from the end: the next launch that touches them, and the next that writes there.
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
