"""Plans of ranks that share a mini-batch, for tests of their verification."""

from __future__ import annotations

import functools
from dataclasses import replace

from mbc.compiler import compile_plans
from mbc.hardware.streams import Stream
from mbc.kernels.nccl import CTAS, NAME
from mbc.options import Options
from mbc.plan.collectives import is_collective
from mbc.plan.model import Kernel, Launch, Plan
from mbc.source import Source

NET = """
network net(batch = 8, classes = 3) {
  input image[batch, 2, 6, 6] : float
  input target[batch] : class
  x = image |> conv(4, 3, pad=1) |> bn |> relu |> conv(6, 3, bias=true) |> relu
  logits = x |> flatten |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
"""
SERIAL = frozenset({"concurrent_stream"})


@functools.cache
def plans_of(gpus: int, precision: str = "fp32") -> tuple[Plan, ...]:
    """Return the plans of NET, with one stream of kernels: one plan on 2 GPUs; on 3 GPUs, those of 3 rows and of 2."""
    settings = (("train.precision", precision),)
    return compile_plans(Source("net.mbc", NET), Options("h200", settings, gpus, without=SERIAL))


def collectives(plan: Plan) -> list[int]:
    """Return the launches that sum over ranks."""
    return [i for i, launch in enumerate(plan.train.launches) if is_collective(launch)]


def cut(plan: Plan, first: int) -> Plan:
    """Return the plan with its only bucket cut in two, the first with `first` gradients. Waits are for both."""
    (at,) = collectives(plan)
    launches = list(plan.train.launches)
    launches[at : at + 1] = [part(launches[at], 0, first), part(launches[at], first, len(launches[at].operations))]

    def moved(i: int) -> int:
        return i if i < at else i + 1

    waits = {(moved(a), moved(b)) for a, b in plan.train.waits} | {(a, at) for a, b in plan.train.waits if b == at}
    waits = {(a, b) for a, b in waits if b != at + 1}
    return replace(plan, train=replace(plan.train, launches=tuple(launches), waits=tuple(sorted(waits))))


def part(bucket: Launch, start: int, stop: int) -> Launch:
    """Return a launch that sums a part of a bucket."""
    count = len(bucket.operations)
    accesses = (*bucket.accesses[start:stop], *bucket.accesses[count + start : count + stop])
    return replace(bucket, operations=bucket.operations[start:stop], accesses=accesses)


def with_ctas(launch: Launch, ctas: int) -> Launch:
    assert isinstance(launch.work, Kernel) and launch.work.provider == NAME
    assert launch.stream is Stream.COLLECTIVE
    return replace(launch, work=replace(launch.work, settings=((CTAS, ctas),)))
