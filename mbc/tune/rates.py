"""The learning rate and the momentum as functions of the mini-batch."""

from __future__ import annotations

import math

from mbc.tune.noise_scale import gain

ADASCALE, LINEAR, SQRT = "adascale", "linear", "sqrt"
RULES = (ADASCALE, LINEAR, SQRT)
# Rules by kind of optimizer. Adam divides the gradient by its own size, so that noise shrinks with the square root of
# the batch (Malladi et al., "On the SDEs and scaling rules for adaptive gradient algorithms", 2022).
USUAL_RULES = {"sgd": ADASCALE, "lars": ADASCALE, "adamw": SQRT, "lamb": SQRT}
WARM_UP_SHARE = 0.05  # of the epochs at the base batch: equally many rows at every batch, as in Goyal et al.


def rate_factor(rule: str, noise_scale: float | None, base_rows: int, rows: int) -> float | None:
    """Return the factor of the learning rate from steps of `base_rows` to steps of `rows`.

    Weight decay stays as it is: the decay of a step is rate x weight decay, and thus follows the rate.

    Args:
        rule: `adascale`: AdaScale's gain (Johnson et al. 2020); `linear`: the quotient of rows (Goyal et al. 2017);
            `sqrt`: its square root (Krizhevsky 2014).
        noise_scale: The gradient noise scale in rows. None: `adascale` has no factor.
        base_rows: Rows of the step for which a rate is given.
        rows: Rows of the other step.
    """
    if rule == LINEAR:
        return rows / base_rows
    if rule == SQRT:
        return math.sqrt(rows / base_rows)
    return None if noise_scale is None else gain(noise_scale, base_rows, rows)


def rescaled(rule: str, factor: float, rate: float, momentum: float) -> tuple[float, float]:
    """Return the learning rate and the momentum of another number of rows.

    A velocity forgets by the factor `momentum` in a step, so that its memory is counted in steps. By AdaScale, a step
    replaces `factor` steps of the base batch; thus it forgets as much as they do, `momentum ** factor`. The rate is
    such that `rate / (1 - momentum)`, the rate of a long training, is multiplied by `factor`. With the momentum of the
    base batch, a faster training would overshoot: its velocity would last for more of the training than before.
    The linear rule and that of the square root are used with the momentum of the base batch, as published.

    Args:
        rule: The rule that gave the factor.
        factor: Factor of the learning rate (`rate_factor`).
        rate: Learning rate of the base batch.
        momentum: Momentum of the base batch; 0 for an optimizer without momentum.
    """
    new = momentum**factor if rule == ADASCALE else momentum
    return rate * factor * (1 - new) / (1 - momentum), new
