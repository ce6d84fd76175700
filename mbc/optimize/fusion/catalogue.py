"""The catalogue of fusion patterns (`mbc.optimize.fusion.pattern`): those of a step, and those that recompute a value
within a budget (fused rematerialization)."""

from __future__ import annotations

from mbc.optimize.fusion.catalogue_conv1x1 import (
    BACKWARD,
    BY_MASK,
    CONVOLUTION_FUSED_REMAT,
    DATA_GRADIENT_FUSED_REMAT,
    DATA_SUMS,
    DATA_SUMS_OF_PARTS,
    MAKE_MASK,
    NORMALIZE,
    PAIR_FUSED_REMAT,
    PAIR_SUMS,
    RELU_AND_CONVOLUTION_FUSED_REMAT,
    REMAT_INSIDE,
    REMAT_INSIDE_REDUCTIONS,
    SUMS,
    THROUGH_RELU,
)
from mbc.optimize.fusion.pattern import Part, Pattern

_TWICE = "z2 = batch_normalize(x2, mean2, variance2, gamma2?, beta2?)"
_BEHIND_POOL = ("m = relu_backward(p, dp)", "d = max_pool_backward(index, m)")
_STATISTICS = "mean, variance = batch_statistics(x)"

PATTERNS: tuple[Pattern, ...] = (
    # Forward, one pass over everything: two or three operands are read, one is written.
    Pattern.of(f"z = {NORMALIZE}", "y = relu(z)"),
    Pattern.of(f"z = {NORMALIZE}", "s = add(z, r)", "y = relu(s)"),
    Pattern.of(
        f"z = {NORMALIZE}",
        _TWICE,
        "s = add(z, z2)",
        "y = relu(s)",
    ),
    # The bit mask for its gradient (`mbc.ir.transforms.relu_masks`) is written in the same pass.
    *(
        Pattern.of(
            f"z = {NORMALIZE}",
            *others,
            "y = relu(s)",
            MAKE_MASK,
            launches=(Part(tuple(range(3 + len(others))), ("y", "signs")),),
        )
        for others in (("s = add(z, r)",), (_TWICE, "s = add(z, z2)"))
    ),
    Pattern.of("z = bias_add(x, bias)", "y = relu(z)"),
    Pattern.of(
        "c = concat(left, right)",
        f"z = {NORMALIZE.replace('(x', '(c')}",
        "y = relu(z)",
        launches=(Part((0, 1, 2), ("c", "y")),),
    ),
    # Parts that are normalised each by itself. relu's gradient recomputes each from the input of the normalisation.
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
        Pattern.of(*made, "z = bias_add(x, bias)", f"y = concat({parts})")
        for made in ((), ("x = convolution_backward_data(a, w)",))
        for parts in ("z, r", "r, z")
    ),
    # Backward through relu and batch norm. relu's mask is recomputed from x, which both launches read anyway, so that
    # neither y nor the gradient between the two is read or written.
    Pattern.of(
        f"z = {NORMALIZE}",
        "y = relu(z)",
        "d = relu_backward(y, dy)",
        SUMS,
        BACKWARD,
        launches=(Part((0, 1, 2, 3), ("dgamma", "dbeta")), Part((0, 1, 2, 4), ("dx",))),
        replaces=(2, 3, 4),
    ),
    # The same where the gradient behind relu is that of a part of a concatenation: it is read where it lies.
    Pattern.of(
        f"z = {NORMALIZE}",
        "y = relu(z)",
        "dy = channel_slice(wide)",
        "d = relu_backward(y, dy)",
        SUMS,
        BACKWARD,
        launches=(Part((0, 1, 2, 3, 4), ("dgamma", "dbeta")), Part((0, 1, 2, 3, 5), ("dx",))),
        replaces=(2, 3, 4, 5),
    ),
    # What is normalised is a part of the next concatenation, too, and its gradient the sum of both. It is one itself,
    # and the gradient of its own last part is extracted from the sum in the same pass.
    *(
        Pattern.of(
            f"z = {NORMALIZE}",
            "y = relu(z)",
            "d = relu_backward(y, dy)",
            SUMS,
            BACKWARD.replace("dx", "b"),
            "a = channel_slice(wide)",
            "dx = add(a, b)",
            *taken,
            launches=(
                Part((0, 1, 2, 3), ("dgamma", "dbeta")),
                Part((0, 1, 2, 4, 5, 6, *range(7, 7 + len(taken))), ("dx", *(("part",) if taken else ()))),
            ),
            replaces=(2, 3, 4, 5, 6, *range(7, 7 + len(taken))),
        )
        for taken in ((), ("part = channel_slice(dx)",))
    ),
    # Before a pool, which alone needs what relu made (its gradient is told by the pooled image,
    # `mbc.ir.transforms.commute_relu_pool`): the input of the pool is never stored.
    *(
        Pattern.of(*before, pool)
        for before in ((f"z = {NORMALIZE}", "y = relu(z)"), ("z = bias_add(x, bias)", "y = relu(z)"), ("y = relu(x)",))
        for pool in ("p, index = max_pool(y)", "p = max_pool(y)")
    ),
    # Others read the input of the pool: it is written in the same pass.
    *(
        Pattern.of(
            f"z = {NORMALIZE}",
            "y = relu(z)",
            f"{', '.join(made)} = max_pool(y)",
            launches=(Part((0, 1, 2), ("y", *made)),),
        )
        for made in (("p", "index"), ("p",))
    ),
    # Backward through such a pool. Gathering the pooled gradient takes less than reading what another launch has
    # gathered, so that both launches of a batch norm do.
    Pattern.of(*_BEHIND_POOL),
    Pattern.of(*_BEHIND_POOL, "db = channel_sum(d)", launches=(Part((0, 1, 2), ("d", "db")),)),
    Pattern.of(
        *_BEHIND_POOL,
        SUMS,
        BACKWARD,
        launches=(Part((0, 1, 2), ("dgamma", "dbeta")), Part((0, 1, 3), ("dx",))),
    ),
    # Where others read what is pooled, its gradient is a sum.
    Pattern.of("b = max_pool_backward(index, dp)", "dy = add(a, b)"),
    # So is that of whatever has several readers.
    Pattern.of("s = add(a, b)", "dy = add(s, r)"),
    Pattern.of("b = max_pool_backward(index, dp)", "s = add(a, b)", "dy = add(s, r)"),
    Pattern.of("b = max_pool_backward(index, dp)", "s = add(a, b)", "z = add(s, r)", "dy = add(z, z2)"),
    Pattern.of(
        f"z = {NORMALIZE}",
        "y = relu(z)",
        "b = max_pool_backward(index, dp)",
        "dy = add(a, b)",
        "d = relu_backward(y, dy)",
        SUMS,
        BACKWARD,
        launches=(Part((0, 1, 2, 3, 4, 5), ("dgamma", "dbeta")), Part((0, 1, 2, 3, 4, 6), ("dx",))),
        replaces=(2, 3, 4, 5, 6),
    ),
    # And was concatenated to others: its other gradient is a part of a wider one.
    Pattern.of(
        f"z = {NORMALIZE}",
        "y = relu(z)",
        "b = max_pool_backward(index, dp)",
        "a = channel_slice(wide)",
        "dy = add(a, b)",
        "d = relu_backward(y, dy)",
        SUMS,
        BACKWARD,
        launches=(Part((0, 1, 2, 3, 4, 5, 6), ("dgamma", "dbeta")), Part((0, 1, 2, 3, 4, 5, 7), ("dx",))),
        replaces=(2, 3, 4, 5, 6, 7),
    ),
    # Where relu comes after a residual sum its gradient goes to both branches: it is written by the launch of the
    # reductions.
    *(
        Pattern.of(
            *added,
            through_relu,
            SUMS,
            launches=(Part(tuple(range(2 + len(added))), ("d", "dgamma", "dbeta")),),
        )
        for through_relu in (THROUGH_RELU, BY_MASK)
        for added in ((), ("dy = add(a, b)",))
    ),
    Pattern.of("d = channel_slice(wide)", "db = channel_sum(d)", launches=(Part((0, 1), ("d", "db")),)),
    Pattern.of("d = relu_backward(y, dy)", "db = channel_sum(d)", launches=(Part((0, 1), ("d", "db")),)),
    # Small tensors, where a launch takes longer than its bytes: reductions and what needs them, in one launch.
    *(
        Pattern.of(
            _STATISTICS,
            f"{'y' if not behind else 'z'} = {NORMALIZE}",
            *behind,
            launches=(Part(tuple(range(2 + len(behind))), ("mean", "variance", "y")),),
        )
        for behind in ((), ("y = relu(z)",), ("s = add(z, r)", "y = relu(s)"))
    ),
    Pattern.of(SUMS, BACKWARD, launches=(Part((0, 1), ("dgamma", "dbeta", "dx")),)),
    Pattern.of(
        f"z = {NORMALIZE}",
        "y = relu(z)",
        THROUGH_RELU,
        SUMS,
        BACKWARD,
        launches=(Part((0, 1, 2, 3, 4), ("dgamma", "dbeta", "dx")),),
        replaces=(2, 3, 4),
    ),
    *(
        Pattern.of(
            *added,
            THROUGH_RELU,
            SUMS,
            BACKWARD,
            launches=(Part(tuple(range(3 + len(added))), ("d", "dgamma", "dbeta", "dx")),),
        )
        for added in ((), ("dy = add(a, b)",))
    ),
    # Of a concatenation, one part of which was not read before (`mbc.ir.transforms.concat_statistics`).
    *(
        Pattern.of("m, v = batch_statistics(x)", f"mean, variance = concat_statistics({pairs})")
        for pairs in ("m0, v0, m, v", "m, v, m0, v0")
    ),
    # Statistics in the epilogue of a convolution.
    Pattern.of("x = convolution(a, w)", _STATISTICS, launches=(Part((0, 1), ("x", "mean", "variance")),)),
    *DATA_SUMS,
    *DATA_SUMS_OF_PARTS,
    *REMAT_INSIDE,
    *REMAT_INSIDE_REDUCTIONS,
    *PAIR_SUMS,
)

# Reductions over a gradient behind relu that recompute relu's output as well, for its next reader: most of its operands
# are read anyway. Within a budget they run where relu's output was not kept (`mbc.optimize.remat.fused_remat`).
RELU_FUSED_REMAT: tuple[Pattern, ...] = (
    Pattern.of(
        f"z = {NORMALIZE}",
        "y = relu(z)",
        THROUGH_RELU,
        SUMS,
        launches=(Part((0, 1, 2, 3), ("y", "dgamma", "dbeta")),),
        replaces=(2, 3),
    ),
    *(
        Pattern.of(
            f"z = {NORMALIZE}",
            *others,
            "y = relu(s)",
            *signs,
            *added,
            through_relu,
            SUMS,
            launches=(Part(tuple(range(4 + len(others + signs + added))), ("y", "d", "dgamma", "dbeta")),),
            replaces=tuple(range(2 + len(others + signs), 4 + len(others + signs + added))),
        )
        for others in (("s = add(z, r)",), (_TWICE, "s = add(z, z2)"))
        for signs, through_relu in (((), THROUGH_RELU), ((MAKE_MASK,), BY_MASK))
        for added in ((), ("dy = add(a, b)",))
    ),
)

FUSED_REMAT = (
    *RELU_FUSED_REMAT,
    *CONVOLUTION_FUSED_REMAT,
    *RELU_AND_CONVOLUTION_FUSED_REMAT,
    *DATA_GRADIENT_FUSED_REMAT,
    *PAIR_FUSED_REMAT,
)
