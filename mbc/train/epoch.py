"""An epoch: what it has added up so far, a moment within it, and what is told of it at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Running:
    """A moment within an epoch. `steps` of `steps_in_epoch` (None: not known) are done, `rows` in `seconds`. `loss` is
    the mean of all but `bad_steps`, whose loss is not finite."""

    epoch: int
    epochs: int
    steps: int
    steps_in_epoch: int | None
    loss: float
    accuracy: float | None
    rows: int
    seconds: float
    bad_steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Interval:
    """Steps of an epoch, up to step `total_steps` of the training: `rows` in `seconds`. `loss` is the mean of all but
    `bad_steps`, whose loss is not finite, `learning_rate` that of the last step."""

    epoch: int
    total_steps: int
    steps: int
    loss: float
    accuracy: float | None
    learning_rate: float
    rows: int
    seconds: float
    bad_steps: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Epoch:
    """A finished epoch. `loss` is the mean over its steps but `bad_steps`, whose loss is not finite and which changed
    nothing, `accuracy` that over all; `dropped_rows` did not fill a mini-batch. `first_bad_step` counts from 1, 0 where
    there is none; no good step follows `bad_steps_at_end`. `overflowed_steps` had a finite loss, and were skipped for a
    gradient that fp16 cannot hold. `bad_states` hold values that are not finite since before the first bad step: the
    gradient of an earlier one was not finite though its loss was, and reached them. `total_steps`: of all epochs.
    `waited_seconds`: for which no step ran, because its data were not there yet. `metrics`: those of the source, means
    as that of the loss; `test_metrics`: on test data, where outputs tell them."""

    epoch: int
    epochs: int
    steps: int
    loss: float
    accuracy: float | None
    test_accuracy: float | None
    learning_rate: float
    rows: int
    seconds: float
    dropped_rows: int
    bad_steps: int
    first_bad_step: int = 0
    bad_steps_at_end: int = 0
    overflowed_steps: int = 0
    bad_states: tuple[str, ...] = ()
    total_steps: int = 0
    waited_seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    test_metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass
class Tally:
    """What an epoch, or an interval of it, has added up so far: what a training needs beside its states to go on within
    the epoch. `skipped_before`: the module's count of skipped steps when the epoch began."""

    steps: int = 0
    bad_steps: int = 0
    first_bad_step: int = 0
    bad_steps_at_end: int = 0
    overflowed_steps: int = 0
    skipped_before: int = 0
    losses: float = 0.0
    accuracies: float = 0.0
    judged_steps: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    learning_rate: float = 0.0
    bad_states: tuple[str, ...] = ()
    metric_sums: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, loss: float, accuracy: float | None, metrics: Mapping[str, float]) -> None:
        self.steps += 1
        if math.isfinite(loss):
            self.losses += loss
            for name, value in metrics.items():
                self.metric_sums[name] = self.metric_sums.get(name, 0.0) + value
            self.bad_steps_at_end = 0
        else:
            self.bad_steps += 1
            self.bad_steps_at_end += 1
            self.first_bad_step = self.first_bad_step or self.steps
        if accuracy is not None:
            self.accuracies += accuracy
            self.judged_steps += 1

    @property
    def loss(self) -> float:
        good = self.steps - self.bad_steps
        return self.losses / good if good else math.nan

    @property
    def metrics(self) -> dict[str, float]:
        """Means, of the same steps as that of the loss."""
        good = self.steps - self.bad_steps
        return {name: value / good for name, value in self.metric_sums.items()}

    @property
    def accuracy(self) -> float | None:
        return self.accuracies / self.judged_steps if self.judged_steps else None
