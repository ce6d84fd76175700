"""Reductions of batch normalization's backward pass that recompute ReLU's output in the same launch.

These groups are `RELU_FUSED_REMAT` of `mbc.optimize.fusion.catalogue`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from mbc.kernels.cuda.base import OwnKernel
from mbc.kernels.cuda.norm.batch_norm import FusedSumArguments, fused_sum_arguments, sums_workspace
from mbc.kernels.cuda.wiring import AFFINE, NORMALIZED, SECOND, Wiring, eps, run, taking

FILE = "norm/bn_backward_remat.cu"


def _relu_wiring(operands: int) -> Wiring:
    """Return the wiring of batch_normalize, relu, relu_backward and the reductions."""
    dy, z = operands, operands + 1
    y, d, dgamma, dbeta = run(z + 1, 4)
    return ((run(0, operands), (z,), (y, dy), (0, d, 1, 2)), (y, dgamma, dbeta))


def _add_relu_wiring(operands: int, operands2: int, added: bool, swapped: bool, by_mask: bool) -> Wiring:
    """Return the wiring with a sum before ReLU.

    The second summand is an operand (`operands2` is 0) or another batch_normalize. `added`: the gradient of ReLU's
    output is a sum of two. `by_mask`: ReLU's backward pass reads its bit mask.
    """
    second = (run(operands, operands2),) if operands2 else ()
    dy = operands + (operands2 or 1)
    z = dy + (2 if added else 1)
    other, s = (z + 1, z + 2) if second else (operands, z + 1)
    y = s + 1
    relu_operand = y + 1 if by_mask else y
    total = ((dy, dy + 1),) if added else ()
    gradient, d = (relu_operand + 1, relu_operand + 2) if added else (dy, relu_operand + 1)
    add = (other, z) if swapped else (z, other)
    start = (run(0, operands), *second, add, (s,), *(((y,),) if by_mask else ()), *total)
    through = (gradient, relu_operand) if by_mask else (relu_operand, gradient)
    return ((*start, through, (0, d, 1, 2)), (y, d, d + 1, d + 2))


def _fused_remat(
    group: str, launcher: str, wirings: Iterable[Wiring], added: bool = False, by_mask: bool = False
) -> OwnKernel:
    """Return the kernel of a group; `by_mask`: the group has the bit mask of the recomputed value.

    The kernel does not read the mask, because it computes the value anyway.
    """
    forward = f"{group}{'+relu_mask' if by_mask else ''}{'+add' if added else ''}"
    launcher += "_two_grads" if added else ""
    backward = "relu_backward_masked" if by_mask else "relu_backward"
    residual = {"batch_normalize+relu": "", "batch_normalize+add+relu": "r "}.get(group, f"r {SECOND} ")
    written = "y d" if residual else "y"
    operands = f"{NORMALIZED} {residual}dy {'dy2 ' if added else ''}{written} dgamma dbeta workspace?"
    return OwnKernel(
        f"{forward}+{backward}+batch_normalize_backward_reduce",
        FILE,
        FusedSumArguments,
        fused_sum_arguments,
        eps,
        workspace=sums_workspace,
        launches=2,
        operands=operands,
        launcher=launcher,
        named=f"{launcher}_masked" if by_mask else "",
        takes=taking(*wirings),
    )


# (added, by_mask)
_FORMS = tuple(product((False, True), repeat=2))

KERNELS = (
    _fused_remat("batch_normalize+relu", "batch_normalize_relu_remat_bn_reduce", map(_relu_wiring, AFFINE)),
    *(
        _fused_remat(
            "batch_normalize+add+relu",
            "batch_normalize_add_relu_remat_bn_reduce",
            (_add_relu_wiring(n, 0, added, swapped, by_mask) for n in AFFINE for swapped in (False, True)),
            added,
            by_mask,
        )
        for added, by_mask in _FORMS
    ),
    *(
        _fused_remat(
            "batch_normalize*+add+relu",
            "dual_batch_normalize_add_relu_remat_bn_reduce",
            (
                _add_relu_wiring(n, n2, added, swapped, by_mask)
                for n in AFFINE
                for n2 in AFFINE
                for swapped in (False, True)
            ),
            added,
            by_mask,
        )
        for added, by_mask in _FORMS
    ),
)
