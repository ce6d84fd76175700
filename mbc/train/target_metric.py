"""A value of a metric at which a training ends before its last epoch."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.errors import MbcError
from mbc.ir.graph import TrainingGraph
from mbc.train.epoch import Epoch
from mbc.train.epoch_figures import ACCURACY, TEST_ACCURACY, Criterion, criterion_for
from mbc.train.training_checkpoint import Best


@dataclass
class TargetMissed(MbcError):
    """MBC318: no epoch has reached the target; `history` are the epochs of this run."""

    history: tuple[Epoch, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """A target, which an epoch reaches in which the figure `by` is `value` or better.

    The epoch nearest to the target is part of a checkpoint, so that a resumed training knows whether its last epoch
    reached the target.
    """

    by: Criterion
    value: float

    def nearest(self, before: Best | None, finished: Epoch) -> Best:
        """Return the epoch nearest to the target among a finished epoch and the nearest one before it."""
        new = self.of(finished)
        return new if before is None or new.is_better_than(before, self.by.rises) else before

    def of(self, finished: Epoch) -> Best:
        """Return an epoch's value of the figure."""
        return Best(self.by.name, self.by.of(finished), finished.epoch)

    def is_reached(self, epoch: Best | None) -> bool:
        """Return whether an epoch reaches the target."""
        if epoch is None or epoch.metric != self.by.name:
            return False
        return epoch.value >= self.value if self.by.rises else epoch.value <= self.value

    def missed(self, nearest: Best | None, epochs: int, history: tuple[Epoch, ...]) -> TargetMissed:
        """Return MBC318 after all epochs, with the best of them."""
        passed = f"{epochs} epoch{'s' if epochs > 1 else ''}"
        best = "no epoch is left in which to reach it"
        if nearest is not None and nearest.metric == self.by.name:
            gone = ", whose weights later epochs have replaced" if self.is_reached(nearest) else ""
            best = f"the best is {nearest.value:.4f}, after epoch {nearest.epoch}{gone}"
        return TargetMissed(
            "MBC318", f"{self.by.name} {self.value:g} is not reached in {passed}: {best}",
            "raise --epochs, or lower the target", history=history,
        )  # fmt: skip


def target_for(wanted: tuple[str, float], graph: TrainingGraph, tested: bool) -> Target:
    """Return the target with a metric and its value; `accuracy` means that of test data if there are any.

    Raises:
        MbcError: MBC237 if the metric is not available.
    """
    metric, value = wanted
    return Target(criterion_for(TEST_ACCURACY if metric == ACCURACY and tested else metric, graph, tested), value)
