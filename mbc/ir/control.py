"""The control block: what changes from step to step, in the arena so that a captured graph can read it.

The host writes the first HOST_BYTES before every step; the rest belongs to the device and is read back on request.
`templates/include/mbc_control.h` declares the same structure; a test compares the two.
"""

from __future__ import annotations

CONTROL_BYTES = 256
HOST_BYTES = 32

# (name, NumPy type, offset). The scale is multiplied into the gradient of the loss and divided out by the update
# (as `gradient_scale`, since `guard` may have set another `loss_scale` for the next step by then).
CONTROL_FIELDS: tuple[tuple[str, str, int], ...] = (
    ("step", "<u8", 0),  # counts mini-batches, skipped or not: calls of step, where each takes one
    ("seed", "<u8", 8),  # of dropout
    ("learning_rate", "<f8", 16),
    ("training", "<u4", 24),  # reserved for the host
    ("accumulated", "<u4", 28),  # mini-batches of this step that came before
    ("loss_scale", "<f4", 32),  # 1 except in fp16
    ("proceed", "<u4", 36),  # 1: this step's updates are applied; written by `guard`
    ("updates", "<u4", 40),  # steps whose updates were applied (adamw's bias correction counts these)
    ("skipped", "<u4", 44),  # steps whose updates were not
    ("since_growth", "<u4", 48),  # applied steps since the loss scale last changed
    ("gradient_scale", "<f4", 52),  # the scale that this step's gradients carry; written by `guard`
    # Set once by the host, so that all ranks together draw what one would for the same rows.
    ("global_seed", "<u8", 56),  # the same on all ranks
    ("first_row", "<u8", 64),  # of this rank's rows, in the global mini-batch
    ("rank", "<u4", 72),  # this GPU among those that share a mini-batch
)

INITIAL_LOSS_SCALE = 65536.0
GROWTH_INTERVAL = 2000
SCALE_GROWTH = 2.0
SCALE_BACKOFF = 0.5
