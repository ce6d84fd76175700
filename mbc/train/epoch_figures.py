"""Figures by which epochs are compared: the schedule `plateau` and the best checkpoint go by one of them."""

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
_TEST = "test-"  # before the name of a metric: on test data


class Judged(Protocol):
    """A finished epoch, as far as it is compared with others."""

    @property
    def loss(self) -> float: ...

    @property
    def accuracy(self) -> float | None: ...

    @property
    def test_accuracy(self) -> float | None: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...

    @property
    def test_metrics(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class Criterion:
    """`name`: loss, accuracy, test-accuracy, or that of a metric of the source, with `test-` before it on test data.
    `rises`: whether a larger value is a better one."""

    name: str
    rises: bool

    def of(self, epoch: Judged) -> float:
        known = {LOSS: epoch.loss, ACCURACY: epoch.accuracy, TEST_ACCURACY: epoch.test_accuracy, **epoch.metrics}
        known |= {_TEST + name: value for name, value in epoch.test_metrics.items()}
        found = known[self.name]
        assert found is not None, f"{self.name} was promised"
        return found


def criterion_for(wanted: str | None, graph: TrainingGraph, tested: bool) -> Criterion:
    """`wanted`, else the accuracy on test data where that is known, else the loss.

    MBC237 where it is not known, or where it is a sum of which one part should rise and another fall.
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
        raise MbcError("MBC237", f"'{wanted}' is not known: the network does not classify", "go by `loss`")
    if wanted not in rises:
        of = f": '{wanted.removeprefix(_TEST)}' is of more than outputs and inputs, and so of training steps alone"
        message = f"'{wanted}' is not known{of if wanted.removeprefix(_TEST) in of_source else ''}"
        raise MbcError("MBC237", message, f"go by one of {', '.join((LOSS, *rises))}")
    if wanted in (TEST_ACCURACY, *of_test) and not tested:
        raise MbcError("MBC237", f"'{wanted}' is not known: there are no test data", "give --test, or go by another")
    rising = rises[wanted]
    if rising is None:
        message = f"'{wanted}' is a sum of which one part should rise and another fall: no value of it is the best"
        raise MbcError("MBC237", message, "name a metric of losses alone, or of shares alone, and go by that")
    return Criterion(wanted, rising)


def _rises(graph: TrainingGraph, name: str) -> bool | None:
    """Whether a metric of the source is the better the larger it is: losses should fall, all else should rise. None
    where that is not one direction."""
    directions = {KINDS[op.kind].loss == (weight < 0) for op, weight in named_terms(graph)[name] if weight != 0}
    return directions.pop() if len(directions) == 1 else None
