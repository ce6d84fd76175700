"""The noise scale of a training, from the squared norms that its steps report (`train { noise_scale = true }`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mbc.errors import MbcError
from mbc.ir.graph import TrainingGraph
from mbc.ir.metrics import MEAN_SQUARE, PART_SQUARE
from mbc.tune.noise_scale import GradientMoments, RunningMoments, moments

WARM_UP = 0.1  # share of the measured steps in which the rate rises and nothing counts
MEMORY = 0.5  # share of the steps over which the averages extend


@dataclass(frozen=True, slots=True)
class Parts:
    """The equal parts of a step: their number, and the rows of each."""

    rows: int
    count: int


def parts_of(graph: TrainingGraph) -> Parts:
    """Return the parts of a step: each mini-batch of each rank is one part."""
    ranks = 1 if graph.ranks is None else graph.ranks.size
    return Parts(graph.batch, ranks * graph.optimizer.accumulate)


def moments_of(metrics: Mapping[str, float], parts: Parts, loss_scale: float = 1.0) -> GradientMoments | None:
    """Return the gradient moments of one step; None if they are not finite.

    Args:
        metrics: Metrics that the step reports.
        parts: The step's parts.
        loss_scale: Factor by which the gradients are multiplied.
    """
    part, mean = (metrics[name] / loss_scale**2 for name in (PART_SQUARE, MEAN_SQUARE))
    return moments(parts.rows, parts.count, part, mean) if math.isfinite(part) and math.isfinite(mean) else None


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """A measured noise scale in rows, with its signal and noise; `history` has a value for each counted step."""

    value: float
    signal: float
    noise: float
    history: tuple[float, ...]


class Meter:
    """Averages of gradient moments over the steps of a training."""

    def __init__(self, steps: int) -> None:
        """Start the averages of a training of `steps` steps."""
        self.warm_up = int(steps * WARM_UP)
        self._running = RunningMoments(decay=1 - 1 / max(1.0, MEMORY * (steps - self.warm_up)))
        self._history: list[float] = []

    def add(self, step: int, step_moments: GradientMoments | None) -> None:
        """Add the moments of step `step`, counted from 0; steps of the warm-up do not count."""
        if step_moments is None or step < self.warm_up:
            return
        self._running = self._running.after(step_moments)
        assert self._running.mean is not None
        self._history.append(self._running.mean.noise_scale or 0.0)

    def result(self) -> NoiseScale:
        """Return the noise scale.

        Raises:
            MbcError: MBC312 if no gradient rises above its noise.
        """
        mean = self._running.mean
        if mean is None or mean.noise_scale is None:
            why = "no gradient is finite" if mean is None else "its gradients do not rise above their noise"
            raise MbcError(
                "MBC312",
                f"the noise scale of this training is not measurable: {why}",
                "measure longer with a larger --most-share or a larger base batch, or give it with --noise-scale ROWS",
            )
        return NoiseScale(mean.noise_scale, mean.signal, mean.noise, tuple(self._history))


def check_halves(batch: int) -> int:
    """Return the rows of one half of a mini-batch.

    Raises:
        MbcError: MBC312 if it cannot be halved.
    """
    if batch >= 2:
        return batch // 2
    raise MbcError(
        "MBC312",
        "the noise scale of this training is not measurable: a mini-batch of one row cannot be halved",
        "give a larger base batch with --set batch=2 or more, or give it with --noise-scale ROWS",
    )
