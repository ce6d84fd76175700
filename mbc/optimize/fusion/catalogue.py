"""The catalogue of fusion patterns (`mbc.optimize.fusion.pattern`).

It has patterns for every step, and patterns that recompute a value within a budget (fused rematerialization).
"""

from __future__ import annotations

from mbc.optimize.fusion.catalogue_activations import ACTIVATIONS, GATES, TRANSFORMER_BLOCKS
from mbc.optimize.fusion.catalogue_conv1x1 import (
    BACKWARD,
    BACKWARD_THROUGH_RELU,
    BY_MASK,
    CONVOLUTION_FUSED_REMAT,
    DATA_GRADIENT_FUSED_REMAT,
    DATA_GRADIENT_IN_PARTS,
    DATA_GRADIENT_NORM_REDUCTIONS,
    DATA_GRADIENT_REDUCTIONS,
    DATA_GRADIENT_REDUCTIONS_OF_PARTS,
    MAKE_MASK,
    NARROW_HEADS,
    NORMALIZE,
    NORMALIZE_RELU,
    NORMS_IN_PROLOGUES,
    PAIR_FUSED_REMAT,
    PAIR_REDUCTIONS,
    REDUCTIONS,
    REMAT_INSIDE,
    REMAT_INSIDE_REDUCTIONS,
    THROUGH_RELU,
)
from mbc.optimize.fusion.pattern import LaunchPattern, Pattern

_TWICE = "z2 = batch_normalize(x2, mean2, variance2, gamma2?, beta2?)"
_THROUGH_POOL = ("m = relu_backward(p, dp)", "d = max_pool_backward(index, m)")
_STATISTICS = "mean, variance = batch_statistics(x)"

PATTERNS: tuple[Pattern, ...] = (
    # Forward, one pass over all operands: two or three are read, one is written.
    Pattern.of(*NORMALIZE_RELU),
    Pattern.of(f"z = {NORMALIZE}", "s = add(z, r)", "y = relu(s)"),
    Pattern.of(f"z = {NORMALIZE}", _TWICE, "s = add(z, z2)", "y = relu(s)"),
    # The bit mask for its gradient (`mbc.passes.relu_bit_masks`) is written in the same pass.
    *(
        Pattern.of(
            f"z = {NORMALIZE}",
            *others,
            "y = relu(s)",
            MAKE_MASK,
            launches=(LaunchPattern(tuple(range(3 + len(others))), ("y", "mask")),),
        )
        for others in (("s = add(z, r)",), (_TWICE, "s = add(z, z2)"))
    ),
    Pattern.of("z = bias_add(x, bias)", "y = relu(z)"),
    *ACTIVATIONS,
    *GATES,
    *TRANSFORMER_BLOCKS,
    Pattern.of(
        "c = concat(left, right)",
        f"z = {NORMALIZE.replace('(x', '(c')}",
        "y = relu(z)",
        launches=(LaunchPattern((0, 1, 2), ("c", "y")),),
    ),
    # Concatenated parts, each normalised by itself. ReLU's gradient recomputes each part from the input of its
    # normalisation.
    *(
        Pattern.of(
            *(f"z{i} = batch_normalize(x{i}, mean{i}, variance{i}, gamma{i}?, beta{i}?)" for i in parts),
            *(f"y{i} = relu(z{i})" for i in parts),
            f"c = concat({', '.join(f'y{i}' for i in parts)})",
            late=True,
        )
        for parts in (range(3, 7), range(3, 6), range(3, 5))
    ),
    # The output of a transposed convolution is written directly into a part of a concatenation.
    *(
        Pattern.of(*outputs, "z = bias_add(x, bias)", f"y = concat({parts})")
        for outputs in ((), ("x = convolution_backward_data(a, w)",))
        for parts in ("z, r", "r, z")
    ),
    # Backward through ReLU and batch norm. ReLU's mask is recomputed from x, which both launches read anyway, so that
    # neither y nor the gradient between the two is read or written.
    Pattern.of(
        *NORMALIZE_RELU,
        *BACKWARD_THROUGH_RELU,
        launches=(LaunchPattern((0, 1, 2, 3), ("dgamma", "dbeta")), LaunchPattern((0, 1, 2, 4), ("dx",))),
        replaces=(2, 3, 4),
    ),
    # Backward through ReLU and batch norm. ReLU's output gradient is a slice of a concatenation's: it is read in place.
    Pattern.of(
        *NORMALIZE_RELU,
        "dy = channel_slice(wide)",
        *BACKWARD_THROUGH_RELU,
        launches=(LaunchPattern((0, 1, 2, 3, 4), ("dgamma", "dbeta")), LaunchPattern((0, 1, 2, 3, 5), ("dx",))),
        replaces=(2, 3, 4, 5),
    ),
    # The normalised value is also a part of the next concatenation, and its gradient is the sum of both gradients. The
    # value is a concatenation itself: the gradient of its own last part is extracted from the sum in the same pass.
    *(
        Pattern.of(
            *NORMALIZE_RELU,
            "d = relu_backward(y, dy)",
            REDUCTIONS,
            BACKWARD.replace("dx", "b"),
            "a = channel_slice(wide)",
            "dx = add(a, b)",
            *sliced,
            launches=(
                LaunchPattern((0, 1, 2, 3), ("dgamma", "dbeta")),
                LaunchPattern((0, 1, 2, 4, 5, 6, *range(7, 7 + len(sliced))), ("dx", *(("part",) if sliced else ()))),
            ),
            replaces=(2, 3, 4, 5, 6, *range(7, 7 + len(sliced))),
        )
        for sliced in ((), ("part = channel_slice(dx)",))
    ),
    # ReLU before a pool that is the only reader of its output. ReLU's gradient needs only the pooled image
    # (`mbc.passes.commute_relu_pool`), so the input of the pool is never stored.
    # Before a pool that is the only reader of ReLU's output (whose gradient needs only the pooled image,
    # `mbc.passes.commute_relu_pool`): the input of the pool is never stored.
    *(
        Pattern.of(*before, pool)
        for before in ((f"z = {NORMALIZE}", "y = relu(z)"), ("z = bias_add(x, bias)", "y = relu(z)"), ("y = relu(x)",))
        for pool in ("p, index = max_pool(y)", "p = max_pool(y)")
    ),
    # Other operations read the input of the pool, too: it is written in the same pass.
    *(
        Pattern.of(
            *NORMALIZE_RELU,
            f"{', '.join(outputs)} = max_pool(y)",
            launches=(LaunchPattern((0, 1, 2), ("y", *outputs)),),
        )
        for outputs in (("p", "index"), ("p",))
    ),
    # Backward through such a pool. Both launches of a batch norm gather the pooled gradient: this takes less time than
    # reading the result of another launch that did.
    Pattern.of(*_THROUGH_POOL),
    Pattern.of(*_THROUGH_POOL, "db = channel_sum(d)", launches=(LaunchPattern((0, 1, 2), ("d", "db")),)),
    Pattern.of(
        *_THROUGH_POOL,
        REDUCTIONS,
        BACKWARD,
        launches=(LaunchPattern((0, 1, 2), ("dgamma", "dbeta")), LaunchPattern((0, 1, 3), ("dx",))),
    ),
    # Where other operations read the pool's input as well, its gradient is a sum.
    Pattern.of("b = max_pool_backward(index, dp)", "dy = add(a, b)"),
    # The gradient of any value with several readers is a sum.
    Pattern.of("s = add(a, b)", "dy = add(s, r)"),
    Pattern.of("b = max_pool_backward(index, dp)", "s = add(a, b)", "dy = add(s, r)"),
    Pattern.of("b = max_pool_backward(index, dp)", "s = add(a, b)", "z = add(s, r)", "dy = add(z, z2)"),
    Pattern.of(
        *NORMALIZE_RELU,
        "b = max_pool_backward(index, dp)",
        "dy = add(a, b)",
        *BACKWARD_THROUGH_RELU,
        launches=(LaunchPattern((0, 1, 2, 3, 4, 5), ("dgamma", "dbeta")), LaunchPattern((0, 1, 2, 3, 4, 6), ("dx",))),
        replaces=(2, 3, 4, 5, 6),
    ),
    # The pool's input was also concatenated: the other addend of its gradient is a slice of a wider gradient.
    Pattern.of(
        *NORMALIZE_RELU,
        "b = max_pool_backward(index, dp)",
        "a = channel_slice(wide)",
        "dy = add(a, b)",
        *BACKWARD_THROUGH_RELU,
        launches=(
            LaunchPattern((0, 1, 2, 3, 4, 5, 6), ("dgamma", "dbeta")),
            LaunchPattern((0, 1, 2, 3, 4, 5, 7), ("dx",)),
        ),
        replaces=(2, 3, 4, 5, 6, 7),
    ),
    # Where ReLU follows a residual sum, its gradient goes to both branches: the launch of the reductions writes it.
    *(
        Pattern.of(
            *added,
            through_relu,
            REDUCTIONS,
            launches=(LaunchPattern(tuple(range(2 + len(added))), ("d", "dgamma", "dbeta")),),
        )
        for through_relu in (THROUGH_RELU, BY_MASK)
        for added in ((), ("dy = add(a, b)",))
    ),
    Pattern.of("d = channel_slice(wide)", "db = channel_sum(d)", launches=(LaunchPattern((0, 1), ("d", "db")),)),
    Pattern.of("d = relu_backward(y, dy)", "db = channel_sum(d)", launches=(LaunchPattern((0, 1), ("d", "db")),)),
    # Small tensors, for which launch overhead dominates: reductions and their readers in one launch.
    *(
        Pattern.of(
            _STATISTICS,
            f"{'y' if not behind else 'z'} = {NORMALIZE}",
            *behind,
            launches=(LaunchPattern(tuple(range(2 + len(behind))), ("mean", "variance", "y")),),
        )
        for behind in ((), ("y = relu(z)",), ("s = add(z, r)", "y = relu(s)"))
    ),
    Pattern.of(REDUCTIONS, BACKWARD, launches=(LaunchPattern((0, 1), ("dgamma", "dbeta", "dx")),)),
    Pattern.of(
        *NORMALIZE_RELU,
        *BACKWARD_THROUGH_RELU,
        launches=(LaunchPattern((0, 1, 2, 3, 4), ("dgamma", "dbeta", "dx")),),
        replaces=(2, 3, 4),
    ),
    *(
        Pattern.of(
            *added,
            *BACKWARD_THROUGH_RELU,
            launches=(LaunchPattern(tuple(range(3 + len(added))), ("d", "dgamma", "dbeta", "dx")),),
        )
        for added in ((), ("dy = add(a, b)",))
    ),
    # Statistics of a concatenation, one part of which was not reduced before (`mbc.passes.concat_statistics`).
    *(
        Pattern.of("m, v = batch_statistics(x)", f"mean, variance = concat_statistics({pairs})")
        for pairs in ("m0, v0, m, v", "m, v, m0, v0")
    ),
    # Statistics in the epilogue of a convolution, of the batch or of each sample.
    *(
        Pattern.of("x = convolution(a, w)", statistics, launches=(LaunchPattern((0, 1), ("x", "mean", "variance")),))
        for statistics in (_STATISTICS, _STATISTICS.replace("batch", "instance"))
    ),
    *NARROW_HEADS,
    *NORMS_IN_PROLOGUES,
    DATA_GRADIENT_IN_PARTS,
    *DATA_GRADIENT_REDUCTIONS,
    *DATA_GRADIENT_NORM_REDUCTIONS,
    *DATA_GRADIENT_REDUCTIONS_OF_PARTS,
    *REMAT_INSIDE,
    *REMAT_INSIDE_REDUCTIONS,
    *PAIR_REDUCTIONS,
)

# Reductions over the gradient through ReLU that also recompute ReLU's output for its next reader: they read most of the
# operands anyway. Within a budget they run where ReLU's output was not kept (`mbc.optimize.remat.fused_remat`).
RELU_FUSED_REMAT: tuple[Pattern, ...] = (
    Pattern.of(
        *NORMALIZE_RELU,
        THROUGH_RELU,
        REDUCTIONS,
        launches=(LaunchPattern((0, 1, 2, 3), ("y", "dgamma", "dbeta")),),
        replaces=(2, 3),
    ),
    *(
        Pattern.of(
            f"z = {NORMALIZE}",
            *others,
            "y = relu(s)",
            *mask,
            *added,
            through_relu,
            REDUCTIONS,
            launches=(LaunchPattern(tuple(range(4 + len(others + mask + added))), ("y", "d", "dgamma", "dbeta")),),
            replaces=tuple(range(2 + len(others + mask), 4 + len(others + mask + added))),
        )
        for others in (("s = add(z, r)",), (_TWICE, "s = add(z, z2)"))
        for mask, through_relu in (((), THROUGH_RELU), ((MAKE_MASK,), BY_MASK))
        for added in ((), ("dy = add(a, b)",))
    ),
)

FUSED_REMAT = (*RELU_FUSED_REMAT, *CONVOLUTION_FUSED_REMAT, *DATA_GRADIENT_FUSED_REMAT, *PAIR_FUSED_REMAT)
