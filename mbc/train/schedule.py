"""The learning rate as a function of the training's progress, with the values of torch.optim.lr_scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mbc.errors import MbcError

if TYPE_CHECKING:  # help has the names of schedules, and needs no more
    from mbc.train.epoch_figures import Criterion

KINDS = ("constant", "cosine", "step", "multi-step", "poly", "one-cycle", "plateau")
USUAL_RATES = {"sgd": 0.1, "adamw": 0.001, "lars": 1.0, "lamb": 0.001}  # by the kind of optimizer

# Defaults of one-cycle (Smith and Topin 2019), as in PyTorch: the share of the epochs in which the rate rises, unless a
# warm-up sets it; the peak rate over the first rate; the first rate over the last.
_RISE, _PEAK_OVER_FIRST, _FIRST_OVER_LAST = 0.3, 25.0, 1e4
_ROUNDING = 1e-9  # epochs: the begin of a step is a quotient, and thus rounded


@dataclass(frozen=True, slots=True)
class Schedule:
    """A peak learning rate and how it changes.

    * constant: stays at `rate`
    * cosine: falls to 0 at `epochs`, as half a cosine
    * step: is multiplied by `factor` every `every_epochs`
    * multi-step: is multiplied by `factor` at each of the `milestones`, in epochs
    * poly: falls to 0 at `epochs`, as the remaining share to the power of `power`
    * one-cycle: rises to `rate` as half a cosine, then falls as half a cosine
    * plateau: is multiplied by `factor` when `metric` (`mbc.train.epoch_figures`) has not improved for more than
      `patience` epochs
    * a function: gets the number of steps before a step, and returns the factor of `rate`; it must be equal on all
      ranks

    During the first `warmup_epochs` the rate grows linearly from 0 to the schedule's rate. For one-cycle they are its
    rising part, by default three tenths of the epochs.
    """

    rate: float
    epochs: int
    kind: str | Callable[[int], float] = "constant"
    warmup_epochs: float = 0.0
    every_epochs: float = 30.0
    factor: float = 0.1
    milestones: tuple[float, ...] = ()
    power: float = 1.0
    patience: int = 10
    metric: str | None = None

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            MbcError: MBC170 for a setting that is not allowed.
        """
        named = not callable(self.kind)
        milestones = (0.0, *self.milestones)
        for wrong, problem, remedy in (
            (
                named and self.kind not in KINDS,
                f"there is no schedule '{self.kind}'",
                f"choose one of {', '.join(KINDS)}",
            ),
            (
                not (math.isfinite(self.rate) and self.rate > 0),
                f"a learning rate of {self.rate:g} is not a number above 0",
                f"give one as --lr 0.01 (usual are {', '.join(f'{r} for {o}' for o, r in USUAL_RATES.items())})",
            ),
            (self.epochs < 1, f"{self.epochs} epochs are not above 0", "train for one epoch or more"),
            (
                not 0 <= self.warmup_epochs <= self.epochs,
                f"a warm-up of {self.warmup_epochs} epochs is not between 0 and the {self.epochs} epochs",
                "give a --warmup within the epochs of the training",
            ),
            (
                not self.every_epochs > 0,
                f"a step every {self.every_epochs} epochs is not above 0",
                "give --step-epochs above 0",
            ),
            (
                not 0 < self.factor <= 1,
                f"a factor of {self.factor} is not between 0 and 1",
                "give a --step-factor above 0 and at most 1",
            ),
            (
                self.kind == "multi-step" and not self.milestones,
                "the schedule multi-step has no milestones",
                "give the epochs after which the rate falls, as --milestones 30,60,80",
            ),
            (
                not all(one < other < math.inf for one, other in zip(milestones, self.milestones, strict=False)),
                f"the milestones {', '.join(f'{one:g}' for one in self.milestones)} are not rising numbers above 0",
                "give the epochs after which the rate falls in their order, as --milestones 30,60,80",
            ),
            (
                not 0 < self.power < math.inf,
                f"a power of {self.power} is not a number above 0",
                "give a --power above 0: with 1 the rate falls along a straight line; 0.9 is usual",
            ),
            (self.patience < 0, f"a patience of {self.patience} epochs is below 0", "give a --patience of 0 or more"),
        ):
            if wrong:
                raise MbcError("MBC170", problem, remedy)

    def at(self, epoch: float, step_epochs: float = 0.0, steps: int = 0) -> float:
        """Return the learning rate of a step; for a plateau before its multiplication by `Plateau.scale`.

        Args:
            epoch: Epochs before the step, as a fraction.
            step_epochs: Length of the step in epochs: one over the steps of an epoch.
            steps: Steps before the step.
        """
        rate = self.rate * self._share(epoch, step_epochs, steps)
        if self.warmup_epochs == 0 or self.kind == "one-cycle":
            return rate
        # The rate in the middle of the step, so that the first step does not have the rate 0.
        return rate * min(1.0, (epoch + step_epochs / 2) / self.warmup_epochs)

    def _share(self, epoch: float, step_epochs: float, steps: int) -> float:
        done = min(1.0, epoch / self.epochs)
        if callable(self.kind):
            return self.kind(steps)
        if self.kind == "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        if self.kind == "step":
            return self.factor ** math.floor((epoch + _ROUNDING) / self.every_epochs)
        if self.kind == "multi-step":
            return self.factor ** sum(milestone <= epoch + _ROUNDING for milestone in self.milestones)
        if self.kind == "poly":
            return (1 - done) ** self.power
        return self._cycle(epoch, step_epochs) if self.kind == "one-cycle" else 1.0

    def _cycle(self, epoch: float, step_epochs: float) -> float:
        """Return the share of the peak rate in one-cycle.

        The last step of the rise has the highest rate, and the last step of the training the lowest.
        """
        top = (self.warmup_epochs or _RISE * self.epochs) - step_epochs
        first = 1 / _PEAK_OVER_FIRST
        if epoch < top:
            return _between(first, 1.0, epoch / top)
        down = self.epochs - step_epochs - top
        return _between(1.0, first / _FIRST_OVER_LAST, min(1.0, (epoch - top) / down) if down > 0 else 0.0)


@dataclass(frozen=True, slots=True)
class Plateau:
    """State of the schedule `plateau` after some epochs, as in torch.optim.lr_scheduler.ReduceLROnPlateau.

    `metric` is the name of the `Criterion` to which `best` belongs. It is None before the first epoch, and in
    checkpoints of earlier versions.
    """

    best: float | None = None
    bad_epochs: int = 0  # epochs since the best one, or since the rate was lowered
    scale: float = 1.0  # factor of the rate
    metric: str | None = None

    def after(self, value: float, by: Criterion, schedule: Schedule) -> Plateau:
        """Return the state after another epoch, in which the metric was `value`."""
        best, metric = self.best, by.name
        if best is None or (value > best * (1 + 1e-4) if by.rises else value < best * (1 - 1e-4)):
            return Plateau(value, 0, self.scale, metric)
        if self.bad_epochs < schedule.patience:
            return Plateau(best, self.bad_epochs + 1, self.scale, metric)
        lower = self.scale * schedule.factor
        ends = schedule.rate * (self.scale - lower) <= 1e-8  # PyTorch does not lower the rate any further
        return Plateau(best, 0, self.scale if ends else lower, metric)


def _between(start: float, end: float, share: float) -> float:
    """Return the value at a `share` of the way along half a cosine from `start` to `end`."""
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))
