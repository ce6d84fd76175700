"""Groups that begin with the products of 1x1 convolutions and of the gradients of their images: batch normalisation's
backward pass behind them.

Those of PATTERNS (`mbc.optimize.patterns`) are for a step as it is; those of ALONG make again what a budget did not
keep.
"""

from __future__ import annotations

from mbc.optimize.pattern import Part, Pattern

NORMALIZE = "batch_normalize(x, mean, variance, gamma?, beta?)"
SUMS = "dgamma, dbeta = batch_normalize_sums(x, d, mean, variance)"
THROUGH_RELU = "d = relu_backward(y, dy)"
MAKE_SIGNS = "signs = relu_signs(y)"
BY_SIGNS = "d = relu_backward_signs(dy, signs)"
BACKWARD = "dx = batch_normalize_backward(x, d, mean, variance, dgamma, dbeta, gamma?)"
_DATA = "dy = convolution_backward_data(g, w)"
_DATA_ADDED = (_DATA.replace("dy", "a"), "dy = add(a, b)")
_MADE = "x = convolution(image, w)"
_SECOND = tuple(tuple(text.replace("w)", "w2)") for text in texts) for texts in ((_DATA,), _DATA_ADDED))

# Sums over the gradient that a convolution makes, or the sum of that and another one, through relu: it is summed up
# before it is written, or in the place of that.
DATA_SUMS: tuple[Pattern, ...] = (
    *(
        Pattern.of(
            *gradient,
            through_relu,
            SUMS,
            launches=(Part(tuple(range(2 + len(gradient))), ("d", "dgamma", "dbeta")),),
            measured=True,
        )
        for through_relu in (THROUGH_RELU, BY_SIGNS)
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

# What a convolution made is made again for batch normalisation's backward pass, and kept to itself: where its image is
# smaller there is less to read.
MADE_INSIDE: tuple[Pattern, ...] = (
    *(
        Pattern.of(_MADE, last, launches=(Part((0, 1), made),), replaces=(1,), measured=True)
        for last, made in ((SUMS, ("dgamma", "dbeta")), (BACKWARD, ("dx",)))
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

# The same of sums behind relu, whose gradient they write.
INSIDE_SUMS: tuple[Pattern, ...] = tuple(
    Pattern.of(
        _MADE,
        *added,
        through_relu,
        SUMS,
        launches=(Part(tuple(range(3 + len(added))), ("d", "dgamma", "dbeta")),),
        replaces=tuple(range(1, 3 + len(added))),
        measured=True,
    )
    for through_relu in (THROUGH_RELU, BY_SIGNS)
    for added in ((), ("dy = add(a, b)",))
)

# And the gradient that comes back to them: neither is read or written.
PAIR_SUMS: tuple[Pattern, ...] = tuple(
    Pattern.of(
        _MADE,
        *gradient,
        through_relu,
        SUMS,
        launches=(Part(tuple(range(3 + len(gradient))), ("d", "dgamma", "dbeta")),),
        replaces=tuple(range(1, 3 + len(gradient))),
        measured=True,
    )
    for through_relu in (THROUGH_RELU, BY_SIGNS)
    for gradient in _SECOND
)

# Sums that make again on the way what they are over: a product that takes less than reading its result.
CONVOLUTION_ALONG: tuple[Pattern, ...] = (
    Pattern.of(_MADE, SUMS, launches=(Part((0, 1), ("x", "dgamma", "dbeta")),), replaces=(1,)),
    *(
        Pattern.of(
            _MADE,
            *added,
            through_relu,
            SUMS,
            launches=(Part(tuple(range(3 + len(added))), ("x", "d", "dgamma", "dbeta")),),
            replaces=tuple(range(1, 3 + len(added))),
        )
        for through_relu in (THROUGH_RELU, BY_SIGNS)
        for added in ((), ("dy = add(a, b)",))
    ),
)

# Both, where either would be: relu's output is made of what the convolution makes, which nobody has to read then.
BOTH_ALONG: tuple[Pattern, ...] = tuple(
    Pattern.of(
        _MADE,
        f"z = {NORMALIZE}",
        "s = add(z, r)",
        "y = relu(s)",
        *signs,
        *added,
        through_relu,
        SUMS,
        launches=(Part(tuple(range(6 + len(signs + added))), ("x", "y", "d", "dgamma", "dbeta")),),
        replaces=tuple(range(4 + len(signs), 6 + len(signs + added))),
    )
    for signs, through_relu in (((), THROUGH_RELU), ((MAKE_SIGNS,), BY_SIGNS))
    for added in ((), ("dy = add(a, b)",))
)

# relu's output along with the sums of `DATA_SUMS`.
DATA_ALONG: tuple[Pattern, ...] = (
    Pattern.of(
        _DATA,
        f"z = {NORMALIZE}",
        "y = relu(z)",
        THROUGH_RELU,
        SUMS,
        launches=(Part((0, 1, 2, 3, 4), ("dy", "y", "dgamma", "dbeta")),),
        replaces=(0, 3, 4),
    ),
    *(
        Pattern.of(
            gradient[0],
            f"z = {NORMALIZE}",
            "s = add(z, r)",
            "y = relu(s)",
            *signs,
            *gradient[1:],
            through_relu,
            SUMS,
            launches=(Part(tuple(range(5 + len(signs + gradient))), ("y", "d", "dgamma", "dbeta")),),
            replaces=(0, *range(4 + len(signs), 5 + len(signs + gradient))),
        )
        for signs, through_relu in (((), THROUGH_RELU), ((MAKE_SIGNS,), BY_SIGNS))
        for gradient in ((_DATA,), _DATA_ADDED)
    ),
)

# The same of `PAIR_SUMS`.
PAIR_ALONG: tuple[Pattern, ...] = tuple(
    Pattern.of(
        _MADE,
        gradient[0],
        f"z = {NORMALIZE}",
        "s = add(z, r)",
        "y = relu(s)",
        *signs,
        *gradient[1:],
        through_relu,
        SUMS,
        launches=(Part(tuple(range(6 + len(signs + gradient))), ("y", "d", "dgamma", "dbeta")),),
        replaces=(1, *range(5 + len(signs), 6 + len(signs + gradient))),
    )
    for signs, through_relu in (((), THROUGH_RELU), ((MAKE_SIGNS,), BY_SIGNS))
    for gradient in _SECOND
)
