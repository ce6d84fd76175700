"""The control block: numbers that change from step to step, in the arena so that a captured graph can read them.

The host writes the first HOST_BYTES before every step; the device owns the rest, which the host reads on request.
`templates/include/mbc_control.h` declares the same structure; a test compares the two.
"""

from __future__ import annotations

CONTROL_BYTES = 256
HOST_BYTES = 32

# (name, NumPy type, offset). The gradient of the loss is multiplied by the loss scale. Updates divide by
# `gradient_scale`, because by then `guard` may have set another `loss_scale` for the next step.
CONTROL_FIELDS: tuple[tuple[str, str, int], ...] = (
    ("step", "<u8", 0),  # number of mini-batches, skipped or not; of calls of `step` if each takes one
    ("seed", "<u8", 8),  # seed of dropout
    ("learning_rate", "<f8", 16),
    ("training", "<u4", 24),  # reserved for the host
    ("accumulated", "<u4", 28),  # earlier mini-batches of this step
    ("loss_scale", "<f4", 32),  # 1 except in fp16
    ("proceed", "<u4", 36),  # 1: the updates of this step are applied; written by `guard`
    ("updates", "<u4", 40),  # steps whose updates were applied (adamw's bias correction counts these)
    ("skipped", "<u4", 44),  # steps whose updates were not applied
    ("since_growth", "<u4", 48),  # applied steps since the loss scale last changed
    ("gradient_scale", "<f4", 52),  # the scale that this step's gradients carry; written by `guard`
    # Set once by the host, so that all ranks together draw the random numbers of one GPU for the same rows.
    ("global_seed", "<u8", 56),  # equal on all ranks
    ("first_row", "<u8", 64),  # index in the global mini-batch of this rank's first row
    ("rank", "<u4", 72),  # number of this rank
)

INITIAL_LOSS_SCALE = 65536.0
GROWTH_INTERVAL = 2000
SCALE_GROWTH = 2.0
SCALE_BACKOFF = 0.5
