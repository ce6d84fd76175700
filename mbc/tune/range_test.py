"""The learning rate of the base batch, by a range test: one training whose rate rises from step to step.

Smith, "Cyclical learning rates for training neural networks" (2017). The loss falls once the rate is large enough, and
rises when it is too large. The chosen rate is a factor below the rate with the lowest loss, since a training keeps it
for thousands of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mbc.errors import MbcError

BELOW_USUAL, ABOVE_USUAL = 1e-2, 10.0  # first and last rate, over the optimizer's usual rate
SMOOTHING = 0.8  # decay of the losses' exponential average, since mini-batches differ
DIVERGED = 2.0  # the test ends at this factor of the lowest smoothed loss
BELOW_LOWEST = 10.0  # rate of the lowest smoothed loss over the chosen rate, as in fastai (Howard and Gugger 2020)
LEAST_FALL = 0.02  # share of the first loss by which the loss must fall; otherwise no rate learns anything


@dataclass(frozen=True, slots=True)
class RangeTest:
    """The result of a range test.

    Attributes:
        rates: Learning rates of the steps, up to the end of the test.
        losses: Smoothed losses of these steps.
        chosen: The learning rate that is taken.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    chosen: float


def rates_of_test(usual: float, steps: int) -> tuple[float, ...]:
    """Return the rates of a test of `steps` steps around the usual rate, evenly on a logarithmic scale."""
    low, high = math.log(usual * BELOW_USUAL), math.log(usual * ABOVE_USUAL)
    return tuple(math.exp(low + (high - low) * i / (steps - 1)) for i in range(steps))


def range_test(step: Callable[[float], float], rates: Sequence[float]) -> RangeTest:
    """Return the result of a range test.

    Args:
        step: Trains one step at a learning rate and returns its loss.
        rates: Rates of the steps, which rise.

    Raises:
        MbcError: MBC313 if the loss is not finite or rises at the lowest rates, or if it falls at no rate.
    """
    losses: list[float] = []
    for loss in _smoothed(map(step, rates)):
        if not math.isfinite(loss) or (losses and loss > DIVERGED * min(losses)):
            break
        losses.append(loss)
    tried = tuple(rates[: len(losses)])
    lowest = min(range(len(losses)), key=losses.__getitem__, default=0)
    if not losses or losses[lowest] > losses[0] - LEAST_FALL * abs(losses[0]):
        ended = f"on, and diverges at {rates[len(losses)]:.3g}" if len(losses) < len(rates) else f"to {rates[-1]:.3g}"
        raise MbcError(
            "MBC313",
            f"the range test finds no learning rate: the loss falls at no rate from {rates[0]:.3g} {ended}",
            "give the rate of the base batch with --lr, a larger --most-share, or look for mistakes in the data",
        )
    return RangeTest(tried, tuple(losses), tried[lowest] / BELOW_LOWEST)


def _smoothed(losses: Iterable[float]) -> Iterator[float]:
    """Yield exponential averages of the losses, in which the first ones are not drawn towards zero."""
    total = weight = 0.0
    for loss in losses:
        total = SMOOTHING * total + (1 - SMOOTHING) * loss
        weight = SMOOTHING * weight + 1 - SMOOTHING
        yield total / weight
