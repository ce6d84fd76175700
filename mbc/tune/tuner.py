"""A tuning's steps on data: the range test and the noise scale, within a share of the later training."""

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

# Steps in a long training; more steps add little information.
RANGE_STEPS, NOISE_STEPS = 100, 200
LEAST_STEPS = 16  # least steps of either; fewer give no information
# The median of the tests is taken: on 30 seeds of two tasks the rates of one test of 100 steps differed by up to a
# factor of 8, the medians of three tests of 33 steps by up to 1.03. With 22 steps some tasks learn nothing.
RANGE_TESTS, LEAST_TEST_STEPS = 3, 32


class Reported(Protocol):
    """The loss of a step: `mbc.runtime.step_loss.Loss`."""

    def __float__(self) -> float:
        """Return the loss."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """The step's metrics by name."""
        ...


class Steps(Protocol):
    """The part of `mbc.runtime.module.Module` that a tuning needs; its network reports a noise scale."""

    def step(self, *inputs: Any, lr: float) -> Reported:
        """Train on one step's rows, and return its loss."""
        ...

    @property
    def control(self) -> Mapping[str, int | float]:
        """Counters by name; `loss_scale` is the factor of the gradients."""
        ...


@dataclass(frozen=True, slots=True)
class Spending:
    """Numbers of steps at the base batch: of the later training, of the range test, and of the noise scale."""

    training: int
    range_steps: int
    noise_steps: int

    @property
    def share(self) -> float:
        """The tuning's share of the training's steps."""
        return (self.range_steps + self.noise_steps) / self.training


def spending(data_rows: int, base_rows: int, epochs: int, most_share: float, ranges: bool, measures: bool) -> Spending:
    """Return how many steps a tuning takes.

    Args:
        data_rows: Rows of the data.
        base_rows: Rows of a step at the base batch.
        epochs: Epochs of the later training.
        most_share: Largest share of the training's steps that the tuning may take.
        ranges: Whether a range test is wanted.
        measures: Whether a measurement of the noise scale is wanted.

    Raises:
        MbcError: MBC311 if the data have fewer rows than a step, MBC314 if the share is too small.
    """
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
            f"{most_share:.3g} of the training are {most} steps, too few for tuning, which takes {parts * LEAST_STEPS}",
            f"raise --most-share to {parts * LEAST_STEPS / training:.2g} or --epochs, or give --lr and --noise-scale",
        )
    ranged = min(RANGE_STEPS, most // parts) if ranges else 0
    return Spending(training, ranged, min(NOISE_STEPS, most - ranged) if measures else 0)


def steps_of(graph: TrainingGraph, data: Data, seed: int) -> Iterator[Batch]:
    """Yield the rows of step after step, epoch after epoch, in random order within each step.

    A training may sort the rows of a step, but sorted parts would differ by more than noise.
    """
    inputs, share = inputs_of(graph), step_share_of(graph, 0)
    for epoch in itertools.count():
        has_steps = False
        for number, part in enumerate(data.shuffled(share, seed, epoch)):
            if part.whole:
                has_steps = True
                order = np.random.Generator(np.random.Philox(key=[seed, (epoch << 32) + number]))
                rows = order.permutation(len(part.arrays[0]))
                yield converted(tuple(array[rows] for array in part.arrays), inputs)
        if not has_steps:
            return


def find_rate(
    open_net: Callable[[], Steps], graph: TrainingGraph, data: Data, seed: int, state: State, steps: int
) -> None:
    """Store the learning rate of the base batch in `state`.

    It is the median of up to RANGE_TESTS range tests; of two tests, the lower rate.

    Args:
        open_net: Opens a module with new weights.
        graph: The network.
        data: Data to train on; each test gets other rows.
        seed: Seed of the order of rows.
        state: The tuning's results so far.
        steps: Number of steps, which the tests share.

    Raises:
        MbcError: MBC313 if no test has a result.
    """
    if state.range_test is not None:
        return
    count = max(1, min(RANGE_TESTS, steps // LEAST_TEST_STEPS))
    rates, rows = rates_of_test(USUAL_RATES[graph.optimizer.kind], steps // count), steps_of(graph, data, seed)
    tests: list[RangeTest] = []
    failures: list[MbcError] = []
    for _ in range(count):
        net = open_net()
        try:
            tests.append(range_test(lambda rate, net=net: float(net.step(*next(rows), lr=rate)), rates))
        except MbcError as error:
            if error.code != "MBC313":
                raise
            failures.append(error)
    if not tests:
        raise failures[0]
    state.range_test = sorted(tests, key=lambda test: test.chosen)[(len(tests) - 1) // 2]
    state.write()


def measure(
    open_net: Callable[[], Steps], graph: TrainingGraph, data: Data, seed: int, state: State, steps: int, rate: float
) -> None:
    """Store the noise scale in `state`, measured in a training from new weights.

    Args:
        open_net: Opens a module with new weights.
        graph: The network.
        data: Data to train on.
        seed: Seed of the order of rows.
        state: The tuning's results so far.
        steps: Number of steps of the training.
        rate: Learning rate, to which the rate rises in the first steps.

    Raises:
        MbcError: MBC312 if the noise scale is not measurable.
    """
    if state.noise is not None:
        return
    net, rows, meter, parts = open_net(), steps_of(graph, data, seed), Meter(steps), parts_of(graph)
    for step in range(steps):
        scale = float(net.control["loss_scale"])
        loss = net.step(*next(rows), lr=rate * min(1.0, (step + 1) / max(1, meter.warm_up)))
        meter.add(step, moments_of(loss.metrics, parts, scale))
    state.noise = meter.result()
    state.write()
