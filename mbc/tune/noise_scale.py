"""The gradient noise scale: how many rows a mini-batch may have before more of them teach little more.

McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A; efficiency as in Pollux (OSDI 2021),
the gain as in AdaScale SGD (ICML 2020).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GradientMoments:
    """`signal`: the squared norm of the true gradient; `noise`: the trace of the covariance of one row's gradient. Both
    are estimates without bias, so that either may be negative; sums and means of them are again such estimates."""

    signal: float
    noise: float

    @property
    def noise_scale(self) -> float | None:
        """In rows; None where it is not measurable, since no signal was found above the noise."""
        return max(0.0, self.noise) / self.signal if self.signal > 0 else None


def moments(part_rows: int, parts: int, mean_part_square: float, mean_square: float) -> GradientMoments:
    """From squared norms of the gradients of `parts` equal parts of a mini-batch, `part_rows` rows each.

    `mean_part_square` is the mean of the parts' squared norms, `mean_square` the squared norm of their mean. Parts are
    micro-batches or ranks. With the gradients of two successive steps as the two parts it is the differenced
    estimator, whose noise is half the squared norm of the gradients' difference, a row; a change of the weights between
    them counts as noise. Raises ValueError for fewer than two parts, of which nothing can be told.
    """
    if part_rows < 1 or parts < 2:
        raise ValueError(f"{parts} parts of {part_rows} rows do not tell noise from signal: two parts or more do")
    rows = part_rows * parts
    signal = (rows * mean_square - part_rows * mean_part_square) / (rows - part_rows)
    return GradientMoments(signal, (mean_part_square - mean_square) / (1 / part_rows - 1 / rows))


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Exponential moving averages over steps, each for itself: a quotient of means has less bias than a mean of
    quotients. `weight` is what the averages lack of 1, so that the first steps are not drawn towards zero."""

    decay: float = 0.99
    signal: float = 0.0
    noise: float = 0.0
    weight: float = 0.0

    def after(self, step: GradientMoments) -> RunningMoments:
        """With one more step."""
        new = 1 - self.decay
        return RunningMoments(
            self.decay,
            self.decay * self.signal + new * step.signal,
            self.decay * self.noise + new * step.noise,
            self.decay * self.weight + new,
        )

    @property
    def mean(self) -> GradientMoments | None:
        """None before the first step."""
        return GradientMoments(self.signal / self.weight, self.noise / self.weight) if self.weight else None


def efficiency(noise_scale: float, base_batch: int, batch: int) -> float:
    """Progress a row at `batch` over that at `base_batch`: 1 where they are equal, less for larger batches."""
    return (noise_scale + base_batch) / (noise_scale + batch)


def gain(noise_scale: float, base_batch: int, batch: int) -> float:
    """By which AdaScale multiplies the rate of `base_batch` at `batch`: from 1, where nothing is noise, to
    `batch / base_batch`, where all is. It is the number of steps at `base_batch` that one at `batch` replaces."""
    return efficiency(noise_scale, base_batch, batch) * batch / base_batch
