"""The learning rate of the base batch, by a range test: one training whose rate rises from step to step.

Smith, "Cyclical learning rates for training neural networks" (2017). The loss falls once the rate is large enough, and
rises when it is too large; the rate taken lies a factor below that of the lowest loss, since a training stays there
for thousands of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mbc.errors import MbcError

BELOW_USUAL, ABOVE_USUAL = 1e-2, 10.0  # where the rates begin and end, over the usual one of the optimizer
SMOOTHING = 0.8  # of the losses, an exponential average: mini-batches differ
DIVERGED = 2.0  # times the lowest smoothed loss: then the test ends
BELOW_LOWEST = 10.0  # the rate taken, under that of the lowest smoothed loss: as in fastai (Howard and Gugger 2020)
LEAST_FALL = 0.02  # of the first loss, without which nothing was learned at any rate


@dataclass(frozen=True, slots=True)
class RangeTest:
    """`losses` are smoothed, one of each step at the rate beside it, up to where the test ended. `chosen` is the rate
    that is taken."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    chosen: float


def rates_of_test(usual: float, steps: int) -> tuple[float, ...]:
    """Evenly on a logarithmic scale."""
    low, high = math.log(usual * BELOW_USUAL), math.log(usual * ABOVE_USUAL)
    return tuple(math.exp(low + (high - low) * i / (steps - 1)) for i in range(steps))


def range_test(step: Callable[[float], float], rates: Sequence[float]) -> RangeTest:
    """`step` trains one step at a rate and returns its loss. Raises MBC313 where the loss is not finite, or rises, at
    the lowest rates, and where it falls at none."""
    losses: list[float] = []
    for loss in _smoothed(map(step, rates)):
        if not math.isfinite(loss) or (losses and loss > DIVERGED * min(losses)):
            break
        losses.append(loss)
    tried = tuple(rates[: len(losses)])
    lowest = min(range(len(losses)), key=losses.__getitem__, default=0)
    if not losses or losses[lowest] > losses[0] - LEAST_FALL * abs(losses[0]):
        ended = f"and diverges at {rates[len(losses)]:.3g}" if len(losses) < len(rates) else f"up to {rates[-1]:.3g}"
        raise MbcError(
            "MBC313",
            f"the range test finds no learning rate: the loss falls at none from {rates[0]:.3g} on, {ended}",
            "give the rate of the base batch with --lr, a larger --most-share, or look for mistakes in the data",
        )
    return RangeTest(tried, tuple(losses), tried[lowest] / BELOW_LOWEST)


def _smoothed(losses: Iterable[float]) -> Iterator[float]:
    """Without drawing the first ones towards zero."""
    total = weight = 0.0
    for loss in losses:
        total = SMOOTHING * total + (1 - SMOOTHING) * loss
        weight = SMOOTHING * weight + 1 - SMOOTHING
        yield total / weight
