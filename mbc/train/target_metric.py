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
    """A training has all its epochs behind it; `history` are those of this run."""

    history: tuple[Epoch, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """Reached by an epoch in which `by` is `value` or better. The epoch nearest to it is part of a checkpoint, so that
    a training that is resumed knows whether its last epoch reached it."""

    by: Criterion
    value: float

    def nearest(self, before: Best | None, finished: Epoch) -> Best:
        """Of an epoch and the nearest one before it."""
        new = self.of(finished)
        return new if before is None or new.is_better_than(before, self.by.rises) else before

    def of(self, finished: Epoch) -> Best:
        return Best(self.by.name, self.by.of(finished), finished.epoch)

    def is_reached(self, epoch: Best | None) -> bool:
        """By that epoch."""
        if epoch is None or epoch.metric != self.by.name:
            return False
        return epoch.value >= self.value if self.by.rises else epoch.value <= self.value

    def missed(self, nearest: Best | None, epochs: int, history: tuple[Epoch, ...]) -> TargetMissed:
        """MBC318, after all epochs."""
        behind = f"{epochs} epoch{'s' if epochs > 1 else ''}"
        best = "no epoch is left to see it in"
        if nearest is not None and nearest.metric == self.by.name:
            gone = ", whose weights others have replaced" if self.is_reached(nearest) else ""
            best = f"the best is {nearest.value:.4f}, after epoch {nearest.epoch}{gone}"
        return TargetMissed(
            "MBC318", f"{self.by.name} {self.value:g} is not reached in {behind}: {best}",
            "raise --epochs, or lower the target", history=history,
        )  # fmt: skip


def target_for(wanted: tuple[str, float], graph: TrainingGraph, tested: bool) -> Target:
    """`wanted`: a metric and its value; `accuracy` is that of test data where there are any. MBC237 where the metric is
    not known."""
    metric, value = wanted
    return Target(criterion_for(TEST_ACCURACY if metric == ACCURACY and tested else metric, graph, tested), value)
