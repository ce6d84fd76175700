"""How the learning rate changes with the mini-batch, and what stays."""

from __future__ import annotations

import math

from mbc.tune.noise_scale import gain

ADASCALE, LINEAR, SQRT = "adascale", "linear", "sqrt"
RULES = (ADASCALE, LINEAR, SQRT)
# By the kind of optimizer. Adam divides the gradient by its own size, so that noise shrinks with the square root of the
# batch (Malladi et al., "On the SDEs and scaling rules for adaptive gradient algorithms", 2022).
USUAL_RULES = {"sgd": ADASCALE, "lars": ADASCALE, "adamw": SQRT, "lamb": SQRT}
WARM_UP_SHARE = 0.05  # of the epochs at the base batch: as many rows at every batch, as Goyal et al. warm up


def rate_factor(rule: str, noise_scale: float | None, base_rows: int, rows: int) -> float | None:
    """By which the rate of steps of `base_rows` is multiplied for steps of `rows`: AdaScale's gain (Johnson et al.
    2020), the quotient of rows (Goyal et al. 2017) or its root (Krizhevsky 2014). None for the first where the noise
    scale is not known. Momentum and weight decay stay as they are: the decay of a step is rate x weight decay, so that
    it follows the rate."""
    if rule == LINEAR:
        return rows / base_rows
    if rule == SQRT:
        return math.sqrt(rows / base_rows)
    return None if noise_scale is None else gain(noise_scale, base_rows, rows)
