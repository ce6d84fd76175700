"""A value of a metric at which a training ends before its last epoch."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.errors import MbcError
from mbc.ir.graph import TrainingGraph
from mbc.train.checkpoint import Best
from mbc.train.epoch import Epoch
from mbc.train.metrics import ACCURACY, TEST_ACCURACY, Criterion, criterion_for


@dataclass
class TargetMissed(MbcError):
    """A training has all its epochs behind it; `history` are those of this run."""

    history: tuple[Epoch, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """Reached by an epoch in which `by` is `value` or better. The epoch nearest to it is part of a checkpoint, so that
    a training that is resumed knows whether it has been reached."""

    by: Criterion
    value: float

    def nearest(self, before: Best | None, finished: Epoch) -> Best:
        """Of an epoch and the nearest one before it."""
        new = Best(self.by.name, self.by.of(finished), finished.epoch)
        return new if before is None or new.is_better_than(before, self.by.rises) else before

    def is_reached(self, nearest: Best | None) -> bool:
        if nearest is None or nearest.metric != self.by.name:
            return False
        return nearest.value >= self.value if self.by.rises else nearest.value <= self.value

    def missed(self, nearest: Best | None, epochs: int, history: tuple[Epoch, ...]) -> TargetMissed:
        """MBC318, after all epochs."""
        behind = f"{epochs} epoch{'s' if epochs > 1 else ''}"
        best = "no epoch is left to see it in"
        if nearest is not None and nearest.metric == self.by.name:
            best = f"the best is {nearest.value:.4f}, after epoch {nearest.epoch}"
        return TargetMissed(
            "MBC318", f"{self.by.name} {self.value:g} is not reached in {behind}: {best}",
            "raise --epochs, or lower the target", history=history,
        )  # fmt: skip


def target_for(wanted: tuple[str, float], graph: TrainingGraph, tested: bool) -> Target:
    """`wanted`: a metric and its value; `accuracy` is that of test data where there are any. MBC237 where the metric is
    not known."""
    metric, value = wanted
    return Target(criterion_for(TEST_ACCURACY if metric == ACCURACY and tested else metric, graph, tested), value)
