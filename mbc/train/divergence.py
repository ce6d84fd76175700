"""When a training is past saving, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mbc.errors import MbcError

TOLERATED = 0.1  # share of an epoch's steps whose loss may be not finite: mini-batches of bad data, say
TOLERATED_AT_END = 2  # steps; more than that in a row, up to the end, are no chance
SCALE_SEARCH = 24  # steps in which the loss scale of fp16 comes from 65536, halved every time, below any in use


class Losses(Protocol):
    """What an epoch tells of its losses that are not finite."""

    @property
    def steps(self) -> int: ...

    @property
    def bad_steps(self) -> int: ...

    @property
    def first_bad_step(self) -> int: ...

    @property
    def bad_steps_at_end(self) -> int: ...

    @property
    def overflowed_steps(self) -> int: ...


class Holds(Protocol):
    """What has states."""

    @property
    def states(self) -> Mapping[str, Any]:
        """By name: parameters, statistics and optimizer state."""
        ...

    def state(self, name: str) -> NDArray[Any]: ...


def not_finite(net: Holds) -> tuple[str, ...]:
    """States that hold values which are not finite."""
    return tuple(name for name in net.states if not np.isfinite(net.state(name)).all())


def divergence(spoilt: Sequence[str], finished: Losses) -> str | None:
    """Why nothing can be learned after an epoch, None where something can. A single step is never too many, nor is it
    a divergence when fp16 skips steps while its loss scale finds its value.

    A step whose loss is not finite changes nothing, so that once the weights are past saving every further step is one.
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
            f"{overflowed:,} of its {steps:,} steps had gradients that fp16 cannot hold, whatever the loss scale; up to"
            f" {TOLERATED:.0%} and {SCALE_SEARCH} more are tolerated"
        )
    return None


def diverged(why: str, epoch: int, checkpoint: Path | None, step: int = 0) -> MbcError:
    """MBC231: nothing can be learned from here on, and a checkpoint of it would replace a good one. `step`: that of
    the epoch after which `checkpoint` was written, 0 where it is of before."""
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
    """`; conv0.weight and 3 others hold values that …`, for a message; nothing where there are none."""
    return f"; {_holding(bad_states)}, from the gradient of an earlier step" if bad_states else ""


def _holding(states: Sequence[str]) -> str:
    first, *others = states
    if not others:
        return f"{first} holds values that are not finite"
    return f"{first} and {len(others)} other{'s' if len(others) > 1 else ''} hold values that are not finite"
