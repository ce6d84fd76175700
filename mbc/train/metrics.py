"""Figures by which epochs are compared: the schedule `plateau` and the best checkpoint go by one of them."""

from __future__ import annotations

from typing import Protocol

from mbc.errors import MbcError

LOSS, ACCURACY, TEST_ACCURACY = METRICS = ("loss", "accuracy", "test-accuracy")


class Judged(Protocol):
    """A finished epoch, as far as it is compared with others."""

    @property
    def loss(self) -> float: ...

    @property
    def accuracy(self) -> float | None: ...

    @property
    def test_accuracy(self) -> float | None: ...


def metric_for(wanted: str | None, classifies: bool, tested: bool) -> str:
    """`wanted`, else the accuracy on test data where that is known, else the loss. MBC237 where it is not known."""
    if wanted is None:
        return TEST_ACCURACY if classifies and tested else LOSS
    if wanted != LOSS and not classifies:
        raise MbcError("MBC237", f"'{wanted}' is not known: the network does not classify", "go by `loss`")
    if wanted == TEST_ACCURACY and not tested:
        raise MbcError("MBC237", f"'{wanted}' is not known: there are no test data", "give --test, or go by another")
    return wanted


def rises(metric: str) -> bool:
    """Whether a larger value is a better one."""
    return metric != LOSS


def value_of(metric: str, epoch: Judged) -> float:
    found = {LOSS: epoch.loss, ACCURACY: epoch.accuracy, TEST_ACCURACY: epoch.test_accuracy}[metric]
    assert found is not None, f"{metric} was promised"
    return found
