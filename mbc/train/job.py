"""A training to run: its network, data, schedule and files, and what the loop needs of a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from mbc.ir.graph import TrainingGraph
from mbc.ops.shard import is_sharded
from mbc.train.data import Data
from mbc.train.divergence import Holds
from mbc.train.epoch_figures import Criterion, criterion_for
from mbc.train.evaluation import Predicts
from mbc.train.schedule import Schedule
from mbc.train.share import Group, HoldsStates, Share, step_share_of
from mbc.train.target_metric import Target, target_for
from mbc.train.training_checkpoint import Saves

Array = NDArray[Any]


class Reported(Protocol):
    """The loss of a step. Looking at it, or at the accuracy, may wait for the step."""

    def __float__(self) -> float: ...

    @property
    def accuracy(self) -> float | None:
        """Share of the step's rows classified correctly, None where the network does not classify."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """What the step reports, the metrics of the source by their names included."""
        ...

    @property
    def idle_s(self) -> float | None:
        """How long the device had nothing to do before the step; None where steps are computed when they are called."""
        ...


class Trainable(Saves, Predicts, Holds, HoldsStates, Protocol):
    """What the loop needs of `mbc.runtime.module.Module`."""

    def step(self, *inputs: Array, lr: float) -> Reported: ...

    def averaged(self) -> AbstractContextManager[None]:
        """Within it the moving averages stand in the place of the weights."""
        ...

    @property
    def control(self) -> Mapping[str, int | float]:
        """Counters; `skipped` are steps that changed nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """What to train. `resume` is read before the first epoch. `checkpoint` is written after every epoch, and within
    epochs after every `checkpoint_every` steps (0: not); `best` when an epoch was better than all before it, by
    `best_metric` (the name of a `Criterion`). `group`: the ranks that share each mini-batch, all of which run the same
    job; the first one writes. Figures are told after every `interval` steps (0: not). `stop` is asked before every
    step, and after every epoch: where it says True, the checkpoint is written and the training ends as by Ctrl-C.
    `evaluate_ema`: test data tell what the moving averages are worth; `ema` is where these are written after every
    epoch, as weights alone. `target`: a metric and a value; after the first epoch that reaches it the training ends."""

    graph: TrainingGraph
    data: Data
    schedule: Schedule
    test: Data | None = None
    seed: int = 0
    checkpoint: Path | None = None
    resume: Path | None = None
    group: Group | None = None
    checkpoint_every: int = 0
    best: Path | None = None
    best_metric: str | None = None
    interval: int = 0
    stop: Callable[[], bool] = lambda: False
    evaluate_ema: bool = False
    ema: Path | None = None
    target: tuple[str, float] | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether a checkpoint takes all ranks, since each has a part of the optimizer's states. Then `stop` says the
        same on all of them."""
        return is_sharded(self.graph)

    @property
    def share(self) -> Share:
        """Of the rows of a step."""
        return step_share_of(self.graph, 0 if self.group is None else self.group.rank)

    @property
    def steps_in_epoch(self) -> int | None:
        """None where only reading tells."""
        return None if self.data.rows is None else self.data.rows // self.share.batch

    def criterion(self, wanted: str | None) -> Criterion:
        """MBC237 where it is not known."""
        return criterion_for(wanted, self.graph, self.test is not None)

    def resolved_target(self) -> Target | None:
        """The target, if there is one. MBC237 where its metric is not known."""
        return None if self.target is None else target_for(self.target, self.graph, self.test is not None)
