"""Figures by which epochs are compared, for the schedule `plateau` and for the best checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from mbc.errors import MbcError
from mbc.ir.graph import TrainingGraph
from mbc.ops import KINDS
from mbc.train.accuracy import judged
from mbc.train.evaluation import measures, named_terms

LOSS, ACCURACY, TEST_ACCURACY = "loss", "accuracy", "test-accuracy"
_TEST = "test-"  # prefix of a metric's name: its value on test data


class Judged(Protocol):
    """The figures of a finished epoch that are compared with those of other epochs."""

    @property
    def loss(self) -> float:
        """Mean loss."""
        ...

    @property
    def accuracy(self) -> float | None:
        """Mean accuracy; None if nothing is classified."""
        ...

    @property
    def test_accuracy(self) -> float | None:
        """Accuracy on test data; None if there are none."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """Means of the source's metrics."""
        ...

    @property
    def test_metrics(self) -> Mapping[str, float]:
        """Metrics of the source on test data."""
        ...


@dataclass(frozen=True, slots=True)
class Criterion:
    """A figure by which epochs are compared.

    Attributes:
        name: loss, accuracy, test-accuracy, or the name of a metric of the source, with the prefix `test-` on test
            data.
        rises: Whether a larger value is better.
    """

    name: str
    rises: bool

    def of(self, epoch: Judged) -> float:
        """Return an epoch's value of the figure."""
        figures = {LOSS: epoch.loss, ACCURACY: epoch.accuracy, TEST_ACCURACY: epoch.test_accuracy, **epoch.metrics}
        figures |= {_TEST + name: value for name, value in epoch.test_metrics.items()}
        value = figures[self.name]
        assert value is not None, f"an epoch must have {self.name}"
        return value


def criterion_for(wanted: str | None, graph: TrainingGraph, tested: bool) -> Criterion:
    """Return the criterion with the wanted name.

    Args:
        wanted: Name; None for the accuracy on test data if there is one, or else the loss.
        graph: The network.
        tested: Whether there are test data.

    Raises:
        MbcError: MBC237 if the figure is not available, or if it is a sum of which one part should rise and another
            fall.
    """
    classifies = judged(graph) is not None
    if wanted is None:
        wanted = TEST_ACCURACY if classifies and tested else LOSS
    if wanted == LOSS:
        return Criterion(LOSS, rises=False)
    of_source = {name: _rises(graph, name) for name in named_terms(graph)}
    of_test = {_TEST + measure.name: of_source[measure.name] for measure in measures(graph)}
    rises = {ACCURACY: True, TEST_ACCURACY: True} if classifies else {}
    rises |= of_source | of_test
    if wanted in (ACCURACY, TEST_ACCURACY) and not classifies:
        raise MbcError("MBC237", f"'{wanted}' is not available: the network does not classify", "use `loss`")
    if wanted not in rises:
        of = f": '{wanted.removeprefix(_TEST)}' needs more than outputs and inputs, and exists in training steps alone"
        message = f"'{wanted}' is not available{of if wanted.removeprefix(_TEST) in of_source else ''}"
        raise MbcError("MBC237", message, f"use one of {', '.join((LOSS, *rises))}")
    if wanted in (TEST_ACCURACY, *of_test) and not tested:
        raise MbcError(
            "MBC237", f"'{wanted}' is not available: there are no test data", "give --test, or use another metric"
        )
    rising = rises[wanted]
    if rising is None:
        message = f"one part of the sum '{wanted}' should rise and another should fall: it has no best value"
        raise MbcError("MBC237", message, "add a metric of losses alone, or of shares alone, and use that one")
    return Criterion(wanted, rising)


def _rises(graph: TrainingGraph, name: str) -> bool | None:
    """Return whether larger values of a metric are better; None if it is a sum with parts in both directions.

    Losses should fall, everything else should rise.
    """
    directions = {KINDS[op.kind].loss == (weight < 0) for op, weight in named_terms(graph)[name] if weight != 0}
    return directions.pop() if len(directions) == 1 else None
