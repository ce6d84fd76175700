"""Fusion patterns around pointwise (1x1) convolutions and their data gradients: the reductions of batch normalisation's
backward pass in their epilogue.

Those of PATTERNS (`mbc.optimize.fusion.catalogue`) are for a step as it is; those of ALONG recompute what a budget did
not keep (fused rematerialization).
"""

from __future__ import annotations

from collections.abc import Sequence

from mbc.optimize.fusion.pattern import Part, Pattern

NORMALIZE = "batch_normalize(x, mean, variance, gamma?, beta?)"
SUMS = "dgamma, dbeta = batch_normalize_backward_reduce(x, d, mean, variance)"
THROUGH_RELU = "d = relu_backward(y, dy)"
MAKE_MASK = "signs = relu_mask(y)"
BY_MASK = "d = relu_backward_masked(dy, signs)"
BACKWARD = "dx = batch_normalize_backward(x, d, mean, variance, dgamma, dbeta, gamma?)"
_DATA = "dy = convolution_backward_data(g, w)"
_DATA_ADDED = (_DATA.replace("dy", "a"), "dy = add(a, b)")
_MADE = "x = convolution(image, w)"
_ADDED: tuple[tuple[str, ...], ...] = ((), ("dy = add(a, b)",))
_RELU_AGAIN = ((), THROUGH_RELU), ((MAKE_MASK,), BY_MASK)  # and its gradient: by output, or by bit mask
_SECOND = tuple(tuple(text.replace("w)", "w2)") for text in texts) for texts in ((_DATA,), _DATA_ADDED))


def _at_once(*texts: str, gives: str, stays: tuple[int, ...] = (), measured: bool = False) -> Pattern:
    """One launch of all statements. `stays`: numbers of the statements that it recomputes."""
    everything = range(len(texts))
    replaces = tuple(number for number in everything if number not in stays)
    return Pattern.of(
        *texts, launches=(Part(tuple(everything), tuple(gives.split())),), replaces=replaces, measured=measured
    )


def _behind_sum(
    products: tuple[str, ...], gradient: Sequence[str], signs: tuple[str, ...], through: str, gives: str
) -> Pattern:
    """`_at_once` of convolutions, relu's recomputed output behind a residual sum, and reductions over the gradient
    through it. Of the convolutions only x is recomputed."""
    texts = (*products, f"z = {NORMALIZE}", "s = add(z, r)", "y = relu(s)", *signs)
    again = tuple(number for number, text in enumerate(texts) if text == _MADE or text not in products)
    return _at_once(*texts, *gradient, through, SUMS, gives=gives, stays=again)


# Reductions over a data gradient, or the sum of that and another one, through relu, in the epilogue of the data
# gradient, which is written or not.
DATA_SUMS: tuple[Pattern, ...] = (
    *(
        _at_once(*gradient, through_relu, SUMS, gives="d dgamma dbeta", measured=True)
        for through_relu in (THROUGH_RELU, BY_MASK)
        for gradient in ((_DATA,), _DATA_ADDED)
    ),
    Pattern.of(
        _DATA,
        f"z = {NORMALIZE}",
        "y = relu(z)",
        THROUGH_RELU,
        SUMS,
        BACKWARD,
        launches=(Part((0, 1, 2, 3, 4), ("dy", "dgamma", "dbeta")), Part((1, 2, 3, 5), ("dx",))),
        replaces=(0, 3, 4, 5),
        measured=True,
    ),
)
# The same where what is normalised is a part of the next concatenation, too.
DATA_SUMS_OF_PARTS: tuple[Pattern, ...] = tuple(
    Pattern.of(
        _DATA,
        f"z = {NORMALIZE}",
        "y = relu(z)",
        THROUGH_RELU,
        SUMS,
        BACKWARD.replace("dx", "b"),
        "a = channel_slice(wide)",
        "dx = add(a, b)",
        *taken,
        launches=(
            Part((0, 1, 2, 3, 4), ("dy", "dgamma", "dbeta")),
            Part((1, 2, 3, 5, 6, 7, *range(8, 8 + len(taken))), ("dx", *(("part",) if taken else ()))),
        ),
        replaces=(0, 3, 4, 5, 6, 7, *range(8, 8 + len(taken))),
        measured=True,
    )
    for taken in ((), ("part = channel_slice(dx)",))
)

# A convolution's output is recomputed for batch normalisation's backward pass and never stored: where the convolution's
# input is smaller there is less to read.
REMAT_INSIDE: tuple[Pattern, ...] = (
    *(
        _at_once(_MADE, last, gives=made, stays=(0,), measured=True)
        for last, made in ((SUMS, "dgamma dbeta"), (BACKWARD, "dx"))
    ),
    *(
        Pattern.of(
            _MADE,
            f"z = {NORMALIZE}",
            "y = relu(z)",
            THROUGH_RELU,
            SUMS,
            BACKWARD,
            launches=(Part((*again, 1, 2, 3, 4), ("dgamma", "dbeta")), Part((0, 1, 2, 3, 5), ("dx",))),
            replaces=(3, 4, 5),
            measured=True,
        )
        for again in ((), (0,))
    ),
)

# The same of reductions behind relu, whose gradient they write.
REMAT_INSIDE_REDUCTIONS: tuple[Pattern, ...] = tuple(
    _at_once(_MADE, *added, through_relu, SUMS, gives="d dgamma dbeta", stays=(0,), measured=True)
    for through_relu in (THROUGH_RELU, BY_MASK)
    for added in _ADDED
)

# And the gradient of their input: neither is read or written.
PAIR_SUMS: tuple[Pattern, ...] = tuple(
    _at_once(_MADE, *gradient, through_relu, SUMS, gives="d dgamma dbeta", stays=(0,), measured=True)
    for through_relu in (THROUGH_RELU, BY_MASK)
    for gradient in _SECOND
)

# Reductions that recompute the convolution that they are over, where that takes less than reading its result.
CONVOLUTION_FUSED_REMAT: tuple[Pattern, ...] = (
    _at_once(_MADE, SUMS, gives="x dgamma dbeta", stays=(0,)),
    *(
        _at_once(_MADE, *added, through_relu, SUMS, gives="x d dgamma dbeta", stays=(0,))
        for through_relu in (THROUGH_RELU, BY_MASK)
        for added in _ADDED
    ),
)

# Both, where either would be: relu's output is recomputed from the convolution's, which nothing has to read then.
RELU_AND_CONVOLUTION_FUSED_REMAT: tuple[Pattern, ...] = tuple(
    _behind_sum((_MADE,), added, *relu, gives="x y d dgamma dbeta") for relu in _RELU_AGAIN for added in _ADDED
)

# relu's output together with the reductions of `DATA_SUMS`.
DATA_GRADIENT_FUSED_REMAT: tuple[Pattern, ...] = (
    _at_once(
        _DATA,
        f"z = {NORMALIZE}",
        "y = relu(z)",
        THROUGH_RELU,
        SUMS,
        gives="dy y dgamma dbeta",
        stays=(1, 2),
    ),
    *(
        _behind_sum((first,), others, *relu, gives="y d dgamma dbeta")
        for relu in _RELU_AGAIN
        for first, *others in ((_DATA,), _DATA_ADDED)
    ),
)

# The same of `PAIR_SUMS`.
PAIR_FUSED_REMAT: tuple[Pattern, ...] = tuple(
    _behind_sum((_MADE, first), others, *relu, gives="y d dgamma dbeta")
    for relu in _RELU_AGAIN
    for first, *others in _SECOND
)
