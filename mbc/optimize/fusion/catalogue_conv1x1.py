"""Fusion patterns around pointwise (1x1) convolutions and their data gradients.

They compute the reductions of batch normalisation's backward pass in the epilogue. Patterns of PATTERNS
(`mbc.optimize.fusion.catalogue`) are for any step; patterns of FUSED_REMAT recompute values that a budget did not keep
(fused rematerialization).
"""

from __future__ import annotations

from mbc.kernels.cuda.wiring import NORM_RELUS
from mbc.optimize.fusion.pattern import LaunchPattern, Pattern

NORMALIZE = "batch_normalize(x, mean, variance, gamma?, beta?)"
REDUCTIONS = "dgamma, dbeta = batch_normalize_backward_reduce(x, d, mean, variance)"
THROUGH_RELU = "d = relu_backward(y, dy)"
MAKE_MASK = "mask = relu_mask(y)"
BY_MASK = "d = relu_backward_masked(dy, mask)"
BACKWARD = "dx = batch_normalize_backward(x, d, mean, variance, dgamma, dbeta, gamma?)"
_ADD = "dy = add(a, b)"
_DATA_GRADIENT = "dy = convolution_backward_data(g, w)"
_DATA_GRADIENT_ADDED = (_DATA_GRADIENT.replace("dy", "a"), _ADD)
_CONVOLUTION = "x = convolution(image, w)"
NORMALIZE_RELU = (f"z = {NORMALIZE}", "y = relu(z)")
BACKWARD_THROUGH_RELU = (THROUGH_RELU, REDUCTIONS, BACKWARD)
_RELU_GRADIENTS = ((), THROUGH_RELU), ((MAKE_MASK,), BY_MASK)  # ReLU's gradient: by its output, or by its bit mask
# Behind a residual sum the shortcut contributes a gradient, too. So launches with both GEMMs, and launches that
# recompute the sum, are for such a sum of gradients alone (decision 066).
_SECOND_ADDED = tuple(text.replace("w)", "w2)") for text in _DATA_GRADIENT_ADDED)


def _single_launch(*texts: str, writes: str, recomputed: tuple[int, ...] = (), measured: bool = False) -> Pattern:
    """Return a pattern with one launch of all statements.

    The statements with the numbers `recomputed` also keep launches of their own.
    """
    everything = range(len(texts))
    replaces = tuple(number for number in everything if number not in recomputed)
    return Pattern.of(
        *texts,
        launches=(LaunchPattern(tuple(everything), tuple(writes.split())),),
        replaces=replaces,
        measured=measured,
    )


def _after_residual_sum(products: tuple[str, ...], mask: tuple[str, ...], through: str) -> Pattern:
    """Return one launch of convolutions, ReLU's output after a residual sum, and reductions over ReLU's gradient.

    ReLU's output is recomputed. The only convolution that is recomputed is the one that computes x.
    """
    texts = (*products, f"z = {NORMALIZE}", "s = add(z, r)", "y = relu(s)", *mask)
    recomputed = tuple(number for number, text in enumerate(texts) if text == _CONVOLUTION or text not in products)
    writes = "y d dgamma dbeta"
    return _single_launch(*texts, _ADD, through, REDUCTIONS, writes=writes, recomputed=recomputed)


# Reductions over the gradient through ReLU, in the epilogue of a data gradient, which is stored or not. A second
# gradient may be added to the data gradient first.
DATA_GRADIENT_REDUCTIONS: tuple[Pattern, ...] = tuple(
    _single_launch(*gradient, through_relu, REDUCTIONS, writes="d dgamma dbeta", measured=True)
    for gradient, through_relu in (
        ((_DATA_GRADIENT,), THROUGH_RELU),
        (_DATA_GRADIENT_ADDED, THROUGH_RELU),
        (_DATA_GRADIENT_ADDED, BY_MASK),
    )
)
# Those of a norm and an activation that are recomputed; the second launch of instance normalisation is a generated one.
_OF_NORMS = Pattern.of(
    *(_DATA_GRADIENT, *NORMALIZE_RELU, *BACKWARD_THROUGH_RELU),
    launches=(LaunchPattern((0, 1, 2, 3, 4), ("dy", "dgamma", "dbeta")), LaunchPattern((1, 2, 3, 5), ("dx",))),
    replaces=(0, 3, 4, 5),
    measured=True,
)
DATA_GRADIENT_NORM_REDUCTIONS = tuple(_OF_NORMS.with_norm(norm, relu) for norm, relu in NORM_RELUS)
# A last layer of few filters behind a norm and an activation: the activation is recomputed from the norm's input, its
# gradient from the filters' gradients, and neither is stored.
_OF_HEADS = (
    Pattern.of(*NORMALIZE_RELU, "p = convolution(y, w)", "o = bias_add(p, bias)", late=True, measured=True),
    Pattern.of(
        *(*NORMALIZE_RELU, _DATA_GRADIENT, "dw = convolution_backward_filter(y, g)", *BACKWARD_THROUGH_RELU),
        launches=(
            LaunchPattern((0, 1, 2, 3, 4, 5), ("dw", "dgamma", "dbeta")),
            LaunchPattern((0, 1, 2, 4, 6), ("dx",)),
        ),
        replaces=(2, 3, 4, 5, 6),
        measured=True,
    ),
)
NARROW_HEADS = tuple(pattern.with_norm(norm, relu) for norm, relu in NORM_RELUS for pattern in _OF_HEADS)
# A convolution whose image a norm and an activation recompute in its prologue, with statistics of its result, and so in
# the prologue of its filter gradient: the activation between two convolutions is not stored.
_BEHIND_NORMS = (*NORMALIZE_RELU, "p = convolution(y, w)", "mean2, variance2 = batch_statistics(p)")
NORMS_IN_PROLOGUES = tuple(
    Pattern.of(
        *(*_BEHIND_NORMS, *backward),
        launches=(LaunchPattern((0, 1, 2, 3), ("p", "mean2", "variance2")), *filters),
        late=True,
        measured=True,
    ).with_norm(norm, relu)
    for norm, relu in NORM_RELUS
    for backward, filters in (
        ((), ()),
        (("dw = convolution_backward_filter(y, g)",), (LaunchPattern((0, 1, 4), ("dw",)),)),
    )
)
# The gradient of a concatenation of two values, which is written in their places.
DATA_GRADIENT_IN_PARTS = Pattern.of(
    "wide = convolution_backward_data(g, w)",
    "a = channel_slice(wide)",
    "b = channel_slice(wide)",
    launches=(LaunchPattern((0, 1, 2), ("a", "b")),),
    measured=True,
)
# The reductions above where the normalised value is also a part of the next concatenation.
DATA_GRADIENT_REDUCTIONS_OF_PARTS: tuple[Pattern, ...] = tuple(
    Pattern.of(
        _DATA_GRADIENT,
        *NORMALIZE_RELU,
        THROUGH_RELU,
        REDUCTIONS,
        BACKWARD.replace("dx", "b"),
        "a = channel_slice(wide)",
        "dx = add(a, b)",
        *sliced,
        launches=(
            LaunchPattern((0, 1, 2, 3, 4), ("dy", "dgamma", "dbeta")),
            LaunchPattern((1, 2, 3, 5, 6, 7, *range(8, 8 + len(sliced))), ("dx", *(("part",) if sliced else ()))),
        ),
        replaces=(0, 3, 4, 5, 6, 7, *range(8, 8 + len(sliced))),
        measured=True,
    )
    for sliced in ((), ("part = channel_slice(dx)",))
)

# A convolution's output is recomputed for batch normalisation's backward pass and never stored: if the convolution's
# input is smaller, fewer bytes are read.
REMAT_INSIDE: tuple[Pattern, ...] = (
    *(
        _single_launch(_CONVOLUTION, last, writes=outputs, recomputed=(0,), measured=True)
        for last, outputs in ((REDUCTIONS, "dgamma dbeta"), (BACKWARD, "dx"))
    ),
    *(
        Pattern.of(
            _CONVOLUTION,
            *NORMALIZE_RELU,
            *BACKWARD_THROUGH_RELU,
            launches=(
                LaunchPattern((*recomputed, 1, 2, 3, 4), ("dgamma", "dbeta")),
                LaunchPattern((0, 1, 2, 3, 5), ("dx",)),
            ),
            replaces=(3, 4, 5),
            measured=True,
        )
        for recomputed in ((), (0,))
    ),
)

# A convolution's output is recomputed for reductions over the gradient through ReLU, which the launch stores.
REMAT_INSIDE_REDUCTIONS: tuple[Pattern, ...] = tuple(
    _single_launch(
        _CONVOLUTION, _ADD, through_relu, REDUCTIONS, writes="d dgamma dbeta", recomputed=(0,), measured=True
    )
    for through_relu in (THROUGH_RELU, BY_MASK)
)

# A convolution's output and the data gradient are both computed inside the reductions: neither is read or written.
PAIR_REDUCTIONS: tuple[Pattern, ...] = tuple(
    _single_launch(
        _CONVOLUTION, *_SECOND_ADDED, through_relu, REDUCTIONS, writes="d dgamma dbeta", recomputed=(0,), measured=True
    )
    for through_relu in (THROUGH_RELU, BY_MASK)
)

# Reductions that recompute the convolution whose output they reduce, where that takes less time than reading it.
CONVOLUTION_FUSED_REMAT: tuple[Pattern, ...] = (
    _single_launch(_CONVOLUTION, REDUCTIONS, writes="x dgamma dbeta", recomputed=(0,)),
    *(
        _single_launch(_CONVOLUTION, _ADD, through_relu, REDUCTIONS, writes="x d dgamma dbeta", recomputed=(0,))
        for through_relu in (THROUGH_RELU, BY_MASK)
    ),
)

# ReLU's output recomputed by the reductions of `DATA_GRADIENT_REDUCTIONS`.
DATA_GRADIENT_FUSED_REMAT: tuple[Pattern, ...] = tuple(
    _after_residual_sum(_DATA_GRADIENT_ADDED[:1], *relu) for relu in _RELU_GRADIENTS
)

# ReLU's output recomputed by the reductions of `PAIR_REDUCTIONS`.
PAIR_FUSED_REMAT: tuple[Pattern, ...] = tuple(
    _after_residual_sum((_CONVOLUTION, _SECOND_ADDED[0]), *relu) for relu in _RELU_GRADIENTS
)
