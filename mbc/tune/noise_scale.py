"""The gradient noise scale: the number of rows beyond which a larger mini-batch adds little progress for each row.

McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A; efficiency as in Pollux (OSDI 2021),
the gain as in AdaScale SGD (ICML 2020).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GradientMoments:
    """Signal and noise of a gradient.

    Both are estimates without bias, so that either may be negative; sums and means of them are such estimates, too.

    Attributes:
        signal: Squared norm of the true gradient.
        noise: Trace of the covariance of one row's gradient.
    """

    signal: float
    noise: float

    @property
    def noise_scale(self) -> float | None:
        """The noise scale in rows; None if it is not measurable, because the signal is not above the noise."""
        return max(0.0, self.noise) / self.signal if self.signal > 0 else None


def moments(part_rows: int, parts: int, mean_part_square: float, mean_square: float) -> GradientMoments:
    """Return the gradient moments of a mini-batch from squared norms of the gradients of its parts.

    Parts are micro-batches or ranks. With the gradients of two successive steps as the two parts, this is the
    differenced estimator: its noise is half the squared norm of the gradients' difference, for each row, and a change
    of the weights between the steps counts as noise.

    Args:
        part_rows: Rows of each part.
        parts: Number of parts, which have equal sizes.
        mean_part_square: Mean of the squared norms of the parts' gradients.
        mean_square: Squared norm of the mean of these gradients.

    Raises:
        ValueError: There are fewer than two parts, which do not separate noise from signal.
    """
    if part_rows < 1 or parts < 2:
        raise ValueError(f"{parts} parts of {part_rows} rows do not separate noise from signal: give two parts or more")
    rows = part_rows * parts
    signal = (rows * mean_square - part_rows * mean_part_square) / (rows - part_rows)
    return GradientMoments(signal, (mean_part_square - mean_square) / (1 / part_rows - 1 / rows))


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Exponential moving averages of signal and noise over steps.

    Each has its own average: a quotient of means has less bias than a mean of quotients. `weight` is the sum of the
        weights
    of all steps so far, by which the averages are divided, so that the first steps are not drawn towards zero.
    """

    decay: float = 0.99
    signal: float = 0.0
    noise: float = 0.0
    weight: float = 0.0

    def after(self, step: GradientMoments) -> RunningMoments:
        """Return the averages with one more step."""
        new = 1 - self.decay
        return RunningMoments(
            self.decay,
            self.decay * self.signal + new * step.signal,
            self.decay * self.noise + new * step.noise,
            self.decay * self.weight + new,
        )

    @property
    def mean(self) -> GradientMoments | None:
        """The averages; None before the first step."""
        return GradientMoments(self.signal / self.weight, self.noise / self.weight) if self.weight else None


def efficiency(noise_scale: float, base_batch: int, batch: int) -> float:
    """Return the progress of a row at `batch` relative to `base_batch`: 1 if they are equal, less if it is larger."""
    return (noise_scale + base_batch) / (noise_scale + batch)


def gain(noise_scale: float, base_batch: int, batch: int) -> float:
    """Return AdaScale's gain, by which the learning rate of `base_batch` is multiplied at `batch`.

    It is between 1, if there is no noise, and `batch / base_batch`, if there is only noise. It is the number of steps
    at `base_batch` that one step at `batch` replaces.
    """
    return efficiency(noise_scale, base_batch, batch) * batch / base_batch
