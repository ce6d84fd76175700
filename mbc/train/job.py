"""A training to run: its network, data, schedule and files, and the part of a module that the loop needs."""

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
    """The loss of a step. Reading it or its properties may wait for the step."""

    def __float__(self) -> float:
        """Return the loss."""
        ...

    @property
    def accuracy(self) -> float | None:
        """Share of the step's rows that were classified correctly; None if the network does not classify."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """The step's metrics by name, those of the source included."""
        ...

    @property
    def idle_s(self) -> float | None:
        """Seconds for which the device was idle before the step; None if steps are computed when they are called."""
        ...


class Trainable(Saves, Predicts, Holds, HoldsStates, Protocol):
    """The part of `mbc.runtime.module.Module` that the loop needs."""

    def step(self, *inputs: Array, lr: float) -> Reported:
        """Train on one step's rows, and return its loss."""
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the moving averages take the place of the weights."""
        ...

    @property
    def control(self) -> Mapping[str, int | float]:
        """Counters by name; `skipped` counts steps that changed nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """A training to run.

    Attributes:
        graph: The network.
        data: The data to train on.
        schedule: The learning rate and the number of epochs.
        test: The data to test on after each epoch; None for no test.
        seed: Seed that shuffles rows and drives dropout.
        checkpoint: File that is written after every epoch; None for no file.
        resume: Checkpoint that is read before the first epoch.
        group: The ranks that share each mini-batch. All run the same job; the first one writes files.
        checkpoint_every: Steps after which `checkpoint` is written within an epoch; 0: never.
        best: File that is written when an epoch was better than all before it.
        best_metric: Name of the `Criterion` by which epochs are compared.
        interval: Steps after which figures are reported; 0: never.
        stop: Called before every step and after every epoch. If it returns True, the checkpoint is written and the
            training ends as by Ctrl-C.
        evaluate_ema: Whether tests use the moving averages instead of the weights.
        ema: File to which the moving averages are written after every epoch, as weights alone.
        target: A metric and its value: the training ends after the first epoch that reaches the value.
    """

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
        """True if each rank has a part of the optimizer's states, so that all ranks take part in a checkpoint.

        `stop` must then return the same on all ranks.
        """
        return is_sharded(self.graph)

    @property
    def share(self) -> Share:
        """This rank's rows of a step."""
        return step_share_of(self.graph, 0 if self.group is None else self.group.rank)

    @property
    def steps_in_epoch(self) -> int | None:
        """Number of steps of an epoch; None if it is known only after reading the data."""
        return None if self.data.rows is None else self.data.rows // self.share.batch

    def criterion(self, wanted: str | None) -> Criterion:
        """Return the criterion with the wanted name, or the usual one for None; MBC237 if it is not available."""
        return criterion_for(wanted, self.graph, self.test is not None)

    def resolved_target(self) -> Target | None:
        """Return the target, or None if there is none; MBC237 if its metric is not available."""
        return None if self.target is None else target_for(self.target, self.graph, self.test is not None)
