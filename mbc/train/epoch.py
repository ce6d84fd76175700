"""Sums over an epoch so far, and the reports within it and at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Running:
    """The state of an epoch after one of its steps.

    Attributes:
        epoch: Number of the epoch, from 1.
        epochs: Number of epochs of the training.
        steps: Steps that are done.
        steps_in_epoch: Steps of the whole epoch; None if unknown.
        loss: Mean loss of the steps so far, without bad steps.
        accuracy: Mean accuracy; None if nothing is classified.
        rows: Rows of these steps.
        seconds: Time of these steps.
        bad_steps: Steps with a loss that is not finite.
        metrics: Means of the source's metrics.
    """

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
    """Some steps of an epoch.

    Attributes:
        epoch: Number of the epoch, from 1.
        total_steps: Number of the last of these steps in the whole training.
        steps: Number of steps.
        loss: Mean loss, without bad steps.
        accuracy: Mean accuracy; None if nothing is classified.
        learning_rate: Learning rate of the last step.
        rows: Rows of these steps.
        seconds: Time of these steps.
        bad_steps: Steps with a loss that is not finite.
        metrics: Means of the source's metrics.
    """

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
    """A finished epoch.

    Attributes:
        epoch: Number of the epoch, from 1.
        epochs: Number of epochs of the training.
        steps: Number of steps.
        loss: Mean loss, without bad steps.
        accuracy: Mean accuracy of all steps; None if nothing is classified.
        test_accuracy: Accuracy on test data; None if there are none.
        learning_rate: Learning rate of the last step.
        rows: Rows of the steps.
        seconds: Time of the steps.
        dropped_rows: Rows that did not fill a mini-batch.
        bad_steps: Steps with a loss that is not finite, which changed nothing.
        first_bad_step: Number of the first of them, from 1; 0 if there is none.
        bad_steps_at_end: Number of bad steps in a row at the end.
        overflowed_steps: Steps with a finite loss that were skipped, because fp16 cannot hold their gradient.
        bad_states: States with values that were not finite before the first bad step: an earlier step had a finite loss
            but a gradient that was not, and it reached them.
        total_steps: Steps of all epochs so far.
        waited_seconds: Time without a running step, because its data had not arrived.
        metrics: Means of the source's metrics, without bad steps.
        test_metrics: Metrics of the source on test data, as far as outputs give them.
    """

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
    """Sums over the steps of an epoch, or of an interval of it.

    A training needs them, beside its states, to continue within the epoch. `skipped_before` is the module's count of
    skipped steps when the epoch began.
    """

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
        """Add a step."""
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
        """Mean loss of steps with a finite loss; NaN if there are none."""
        good = self.steps - self.bad_steps
        return self.losses / good if good else math.nan

    @property
    def metrics(self) -> dict[str, float]:
        """Means of the metrics, of steps with a finite loss."""
        good = self.steps - self.bad_steps
        return {name: value / good for name, value in self.metric_sums.items()}

    @property
    def accuracy(self) -> float | None:
        """Mean accuracy; None if nothing was classified."""
        return self.accuracies / self.judged_steps if self.judged_steps else None
