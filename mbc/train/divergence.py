"""Decides when a training can no longer learn, and writes the message about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError

TOLERATED = 0.1  # share of an epoch's steps whose loss may not be finite, for instance because of bad data
TOLERATED_AT_END = 2  # steps in a row at the end; more are no coincidence
SCALE_SEARCH = 24  # steps in which halving takes fp16's loss scale from 65536 below any useful value


class Losses(Protocol):
    """Counts of an epoch's steps whose losses or gradients are not finite."""

    @property
    def steps(self) -> int:
        """Number of steps."""
        ...

    @property
    def bad_steps(self) -> int:
        """Number of steps with a loss that is not finite."""
        ...

    @property
    def first_bad_step(self) -> int:
        """Number of the first such step, from 1; 0 if there is none."""
        ...

    @property
    def bad_steps_at_end(self) -> int:
        """Number of such steps in a row at the end."""
        ...

    @property
    def overflowed_steps(self) -> int:
        """Number of steps with a finite loss and a gradient that fp16 cannot hold."""
        ...


class Holds(Protocol):
    """An object with states."""

    @property
    def states(self) -> Mapping[str, Any]:
        """Parameters, statistics and optimizer state by name."""
        ...

    def state(self, name: str) -> NDArray[Any]:
        """Return a copy of a state."""
        ...


def not_finite(net: Holds) -> tuple[str, ...]:
    """Return the names of states that hold values which are not finite."""
    return tuple(name for name in net.states if not np.isfinite(net.state(name)).all())


def divergence(spoilt: Sequence[str], finished: Losses) -> str | None:
    """Return why nothing can be learned after an epoch; None if the training can continue.

    A single bad step is always allowed. So are the steps that fp16 skips while its loss scale finds its value. A step
    whose loss is not finite changes nothing: once the weights are useless, every further step is a bad step.

    Args:
        spoilt: States that hold values which are not finite.
        finished: Counts of the epoch's bad steps.
    """
    steps, bad, last = finished.steps, finished.bad_steps, finished.bad_steps_at_end
    overflowed = finished.overflowed_steps
    if spoilt:
        return _holding(spoilt)
    if bad > max(1, steps * TOLERATED):
        return (
            f"{bad:,} of its {steps:,} steps had a loss that is not finite, the first is step"
            f" {finished.first_bad_step:,}; up to {TOLERATED:.0%} are tolerated"
        )
    if last > TOLERATED_AT_END:
        return f"its last {last:,} of {steps:,} steps had a loss that is not finite"
    if overflowed > SCALE_SEARCH + steps * TOLERATED:
        return (
            f"{overflowed:,} of its {steps:,} steps had gradients that fp16 cannot hold at any loss scale; up to"
            f" {TOLERATED:.0%} and {SCALE_SEARCH} more are tolerated"
        )
    return None


def diverged(why: str, epoch: int, checkpoint: Path | None, step: int = 0) -> MbcError:
    """Return MBC231: nothing can be learned from here on, and a checkpoint of this state would replace a good one.

    Args:
        why: The reason, from `divergence`.
        epoch: Number of the epoch, from 0.
        checkpoint: The last good checkpoint; None if there is none.
        step: Step of the epoch after which `checkpoint` was written; 0 if it was written before the epoch.
    """
    kept = remedy = ""
    if checkpoint is not None:
        kept = f"; '{checkpoint}' is left as it was {f'after its step {step:,}' if step else 'before this epoch'}"
        remedy = f", and go on from there with --resume {checkpoint}"
    return MbcError(
        "MBC231",
        f"the training diverged in epoch {epoch + 1}: {why}{kept}",
        f"lower the learning rate, or add a warm-up{remedy}",
    )


def named(bad_states: Sequence[str]) -> str:
    """Return a clause such as `; conv0.weight and 3 others hold values that …`, for a message; empty without states."""
    return f"; {_holding(bad_states)}, from the gradient of an earlier step" if bad_states else ""


def _holding(states: Sequence[str]) -> str:
    first, *others = states
    if not others:
        return f"{first} holds values that are not finite"
    return f"{first} and {len(others)} other{'s' if len(others) > 1 else ''} hold values that are not finite"
