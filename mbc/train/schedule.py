"""The learning rate as a function of how far training has come."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mbc.errors import MbcError

KINDS = ("constant", "cosine", "step")
USUAL_RATES = {"sgd": 0.1, "adamw": 0.001}  # by the kind of optimizer


@dataclass(frozen=True, slots=True)
class Schedule:
    """A peak rate and what becomes of it.

    constant: stays at `rate`. cosine: falls to 0 at `epochs`, half a cosine. step: times `factor` every `every_epochs`.
    During the first `warmup_epochs` the rate grows linearly from 0 to what the schedule says.
    """

    rate: float
    epochs: int
    kind: str = "constant"
    warmup_epochs: float = 0.0
    every_epochs: float = 30.0
    factor: float = 0.1

    def __post_init__(self) -> None:
        for wrong, problem, remedy in (
            (self.kind not in KINDS, f"there is no schedule '{self.kind}'", f"choose one of {', '.join(KINDS)}"),
            (
                not (math.isfinite(self.rate) and self.rate > 0),
                f"a learning rate of {self.rate:g} is not a number above 0",
                f"give one as --lr 0.01 (usual are {', '.join(f'{r} for {o}' for o, r in USUAL_RATES.items())})",
            ),
            (self.epochs < 1, f"{self.epochs} epochs are not above 0", "train for one epoch or more"),
            (
                not 0 <= self.warmup_epochs <= self.epochs,
                f"a warm-up of {self.warmup_epochs} epochs does not lie between 0 and the {self.epochs} epochs",
                "give a --warmup within the epochs of the training",
            ),
            (
                not self.every_epochs > 0,
                f"a step every {self.every_epochs} epochs is not above 0",
                "give --step-epochs above 0",
            ),
            (
                not 0 < self.factor <= 1,
                f"a factor of {self.factor} does not lie between 0 and 1",
                "give a --step-factor above 0 and at most 1",
            ),
        ):
            if wrong:
                raise MbcError("MBC170", problem, remedy)

    def at(self, epoch: float) -> float:
        """The learning rate after `epoch` epochs; a fraction counts the steps of an epoch that has begun."""
        if self.kind == "cosine":
            rate = self.rate * 0.5 * (1 + math.cos(math.pi * min(1.0, epoch / self.epochs)))
        elif self.kind == "step":
            rate = self.rate * self.factor ** math.floor(epoch / self.every_epochs)
        else:
            rate = self.rate
        return rate * min(1.0, epoch / self.warmup_epochs) if self.warmup_epochs > 0 else rate
