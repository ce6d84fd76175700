"""A tuning's steps on data: the range test and the noise scale, within a share of the training that is to follow."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mbc.errors import MbcError
from mbc.ir.graph import TrainingGraph
from mbc.train.accuracy import inputs_of
from mbc.train.data import Data
from mbc.train.inputs import Batch, converted
from mbc.train.schedule import USUAL_RATES
from mbc.train.share import step_share_of
from mbc.tune.measured_noise import Meter, moments_of, parts_of
from mbc.tune.range_test import RangeTest, range_test, rates_of_test
from mbc.tune.tuning_file import State

# Of a long training; more tell little more.
RANGE_STEPS, NOISE_STEPS = 100, 200
LEAST_STEPS = 16  # of either: with fewer neither says anything
# Their median is taken: on 30 seeds of two tasks the rates of one test of 100 steps were up to 8 times apart, medians
# of three tests of 33 steps up to 1.03 times. With 22 steps some tasks have learned nothing by the end.
RANGE_TESTS, LEAST_TEST_STEPS = 3, 32


class Reported(Protocol):
    """The loss of a step: `mbc.runtime.step_loss.Loss`."""

    def __float__(self) -> float: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


class Steps(Protocol):
    """What a tuning needs of `mbc.runtime.module.Module`: of `graph`, which reports a noise scale."""

    def step(self, *inputs: Any, lr: float) -> Reported: ...

    @property
    def control(self) -> Mapping[str, int | float]: ...


@dataclass(frozen=True, slots=True)
class Spending:
    """Steps at the base batch: of the training that is to follow, and of those that the tuning takes."""

    training: int
    range_steps: int
    noise_steps: int

    @property
    def share(self) -> float:
        """Of the training's rows."""
        return (self.range_steps + self.noise_steps) / self.training


def spending(data_rows: int, base_rows: int, epochs: int, most_share: float, ranges: bool, measures: bool) -> Spending:
    """`ranges`, `measures`: whether the range test and the noise scale are wanted. Raises MBC311 for data of fewer rows
    than a step, MBC314 where the share is too small."""
    if data_rows < base_rows:
        raise MbcError(
            "MBC311",
            f"the data hold {data_rows:,} rows, fewer than one step of the base batch, which takes {base_rows:,}",
            f"give more data, or a smaller base batch, for instance with --set batch={max(2, data_rows // 4)}",
        )
    training = epochs * (data_rows // base_rows)
    parts = ranges + measures
    most = int(training * most_share)
    if parts and most < parts * LEAST_STEPS:
        raise MbcError(
            "MBC314",
            f"{most_share:.3g} of the training are {most} steps, too few to tune with: it takes {parts * LEAST_STEPS}",
            f"raise --most-share to {parts * LEAST_STEPS / training:.2g} or --epochs, or say --lr and --noise-scale",
        )
    ranged = min(RANGE_STEPS, most // parts) if ranges else 0
    return Spending(training, ranged, min(NOISE_STEPS, most - ranged) if measures else 0)


def steps_of(graph: TrainingGraph, data: Data, seed: int) -> Iterator[Batch]:
    """Rows of step after step, epoch after epoch. Within a step they are in random order: a training may sort them, and
    sorted parts differ by more than noise."""
    inputs, share = inputs_of(graph), step_share_of(graph, 0)
    for epoch in itertools.count():
        found = False
        for number, part in enumerate(data.shuffled(share, seed, epoch)):
            if part.whole:
                found = True
                order = np.random.Generator(np.random.Philox(key=[seed, (epoch << 32) + number]))
                rows = order.permutation(len(part.arrays[0]))
                yield converted(tuple(array[rows] for array in part.arrays), inputs)
        if not found:
            return


def find_rate(
    open_net: Callable[[], Steps], graph: TrainingGraph, data: Data, seed: int, state: State, steps: int
) -> None:
    """The rate of the base batch, into `state`: the median of up to RANGE_TESTS range tests, each from new weights on
    other rows, which share `steps`; of two the lower. MBC313 where none finds one."""
    if state.range_test is not None:
        return
    count = max(1, min(RANGE_TESTS, steps // LEAST_TEST_STEPS))
    rates, rows = rates_of_test(USUAL_RATES[graph.optimizer.kind], steps // count), steps_of(graph, data, seed)
    found: list[RangeTest] = []
    failures: list[MbcError] = []
    for _ in range(count):
        net = open_net()
        try:
            found.append(range_test(lambda rate, net=net: float(net.step(*next(rows), lr=rate)), rates))
        except MbcError as error:
            if error.code != "MBC313":
                raise
            failures.append(error)
    if not found:
        raise failures[0]
    state.range_test = sorted(found, key=lambda test: test.chosen)[(len(found) - 1) // 2]
    state.write()


def measure(
    open_net: Callable[[], Steps], graph: TrainingGraph, data: Data, seed: int, state: State, steps: int, rate: float
) -> None:
    """The noise scale, into `state`, of a training of so many steps from new weights, whose rate rises to `rate` in the
    first ones. MBC312."""
    if state.noise is not None:
        return
    net, rows, meter, parts = open_net(), steps_of(graph, data, seed), Meter(steps), parts_of(graph)
    for step in range(steps):
        scale = float(net.control["loss_scale"])
        loss = net.step(*next(rows), lr=rate * min(1.0, (step + 1) / max(1, meter.warm_up)))
        meter.add(step, moments_of(loss.metrics, parts, scale))
    state.noise = meter.result()
    state.write()
