"""Fusion patterns of activations other than ReLU after batch normalisation, of gates, and of blocks of transformers.

All are bound by memory, so that estimates predict them well.
"""

from __future__ import annotations

from mbc.optimize.fusion.catalogue_conv1x1 import BACKWARD, NORMALIZE, REDUCTIONS
from mbc.optimize.fusion.pattern import LaunchPattern, Pattern

# A gradient that reads the activation's input recomputes it from the input of the normalisation.
ACTIVATIONS: tuple[Pattern, ...] = (
    *(
        Pattern.of(f"z = {NORMALIZE}", f"y = {activation}(z)", late=True)
        for activation in ("silu", "hardswish", "relu6")
    ),
    *(
        Pattern.of(
            f"z = {NORMALIZE}",
            f"d = {activation}_backward(z, dy)",
            REDUCTIONS,
            BACKWARD,
            launches=(LaunchPattern((0, 1, 2), ("dgamma", "dbeta")), LaunchPattern((0, 1, 3), ("dx",))),
            replaces=(1, 2, 3),
        )
        for activation in ("silu", "hardswish")
    ),
    Pattern.of(
        f"z = {NORMALIZE}",
        "y = relu6(z)",
        "d = relu6_backward(y, dy)",
        REDUCTIONS,
        BACKWARD,
        launches=(LaunchPattern((0, 1, 2, 3), ("dgamma", "dbeta")), LaunchPattern((0, 1, 2, 4), ("dx",))),
        replaces=(2, 3, 4),
    ),
)

# Squeeze-excitation: an image is multiplied by a gate computed from its means; both uses give the image a gradient.
GATES: tuple[Pattern, ...] = (Pattern.of("a = broadcast_mul(do, gate)", "b = avg_pool_backward(ds)", "dy = add(a, b)"),)

# The gradients through gelu and of a scale recompute the sum with the bias.
TRANSFORMER_BLOCKS: tuple[Pattern, ...] = (
    Pattern.of("z = bias_add(x, bias)", "y = gelu(z)", late=True),
    Pattern.of(
        "z = bias_add(x, bias)",
        "d = gelu_backward(z, dy)",
        "db = channel_sum(d)",
        launches=(LaunchPattern((0, 1, 2), ("d", "db")),),
        replaces=(1, 2),
    ),
    Pattern.of("b = layer_norm_backward(x, dy, pixel_mean, pixel_inverse, gamma)", "dx = add(a, b)"),
    Pattern.of("z = bias_add(x, bias)", "s = add(z, r)"),
    Pattern.of("z = bias_add(x, bias)", "m = broadcast(z, scale)", "s = add(m, r)", late=True),
    Pattern.of(
        "z = bias_add(x, bias)",
        "d = broadcast(dy, scale)",
        "db = channel_sum(d)",
        "dscale = row_reduce_dot(dy, z)",
        launches=(LaunchPattern((0, 1, 2, 3), ("d", "db", "dscale")),),
        replaces=(1, 2, 3),
    ),
)
