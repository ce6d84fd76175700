"""How many epochs a training as tuned takes to a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mbc.errors import MbcError
from mbc.ir.graph import TrainingGraph
from mbc.train.data import Data
from mbc.train.epoch import Epoch
from mbc.train.job import Job, Trainable
from mbc.train.loop import train
from mbc.train.metrics import ACCURACY, TEST_ACCURACY
from mbc.train.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Target:
    """`metric` is reached where it is `value` or better, within `epochs` at a constant rate with so long a warm-up."""

    metric: str
    value: float
    rate: float
    epochs: int
    warmup_epochs: float
    seed: int


class _Reached(Exception):
    pass


def epochs_to(
    target: Target, net: Trainable, graph: TrainingGraph, data: Data, test: Data | None, say: Callable[[str], None]
) -> int:
    """Trains until the target is reached after an epoch. `accuracy` is that of test data where there are any. Raises
    MBC318 with the best value where it is not reached, MBC237 for a metric that is not known, and what
    training does."""
    schedule = Schedule(target.rate, target.epochs, warmup_epochs=target.warmup_epochs)
    job = Job(graph, data, schedule, test, target.seed)
    by = job.criterion(TEST_ACCURACY if target.metric == ACCURACY and test is not None else target.metric)
    seen: list[float] = []

    def on_epoch(epoch: Epoch) -> None:
        seen.append(by.of(epoch))
        say(f"epoch {epoch.epoch}: {by.name} {seen[-1]:.4f}")
        if seen[-1] >= target.value if by.rises else seen[-1] <= target.value:
            raise _Reached

    try:
        train(net, job, on_epoch=on_epoch)
    except _Reached:
        return len(seen)
    best = (max if by.rises else min)(seen)
    raise MbcError(
        "MBC318",
        f"{by.name} {target.value:g} is not reached in {target.epochs} epochs: the best is {best:.4f}, after epoch "
        f"{seen.index(best) + 1}",
        "raise --epochs, or lower the target",
    )
