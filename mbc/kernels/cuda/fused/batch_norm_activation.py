"""Fusion groups: batch normalization with the activation after it, forward and backward.

The backward pass recomputes the activation's input from x: neither that input nor its gradient is ever stored.
"""

from __future__ import annotations

from collections.abc import Iterable

from mbc.kernels.cuda.base import OwnKernel
from mbc.kernels.cuda.fused.batch_norm_relu import FusedMapArguments, map_arguments
from mbc.kernels.cuda.generated.generated_map import generated_as
from mbc.kernels.cuda.norm.batch_norm import FusedSumArguments, fused_sum_arguments, sums_workspace
from mbc.kernels.cuda.wiring import AFFINE, NORMALIZED, Wiring, eps, run, taking

FILE = "fused/batch_norm_activation.cu"
# Whether an activation's gradient reads its output, and not its input.
BY_OUTPUT = {"silu": False, "hardswish": False, "relu6": True}


def _forward(operands: int) -> Wiring:
    return (run(0, operands), (operands,)), (operands + 1,)


def _backward(operands: int, by_output: bool, reduces: bool) -> Wiring:
    """Return the wiring of a backward pass.

    Its members are batch normalization and, if `by_output`, the activation, both recomputed; the activation's gradient;
    and the reductions of batch normalization's backward pass (`reduces`), or the gradient of x.
    """
    dy = operands
    sums = () if reduces else (dy + 1, dy + 2, *((3,) if operands == 5 else ()))
    z = dy + (1 if reduces else 3)
    recomputed = (run(0, operands), (z,)) if by_output else (run(0, operands),)
    read = z + len(recomputed) - 1
    d = read + 1
    return (*recomputed, (read, dy), (0, d, 1, 2, *sums)), run(d + 1, 2 if reduces else 1)


def _kernels() -> Iterable[OwnKernel]:
    for name, by_output in BY_OUTPUT.items():
        forward = f"batch_normalize+{name}"
        backward = f"{forward if by_output else 'batch_normalize'}+{name}_backward"
        yield generated_as(forward, f"batch_normalize_{name}", taking(*map(_forward, AFFINE)))
        yield OwnKernel(
            f"{backward}+batch_normalize_backward",
            FILE,
            FusedMapArguments,
            map_arguments,
            eps,
            operands=f"{NORMALIZED} dy dgamma dbeta dx",
            launcher=f"batch_normalize_{name}_backward",
            takes=taking(*(_backward(n, by_output, reduces=False) for n in AFFINE)),
        )
        yield OwnKernel(
            f"{backward}+batch_normalize_backward_reduce",
            FILE,
            FusedSumArguments,
            fused_sum_arguments,
            eps,
            workspace=sums_workspace,
            launches=2,
            accumulates=True,
            operands=f"{NORMALIZED} dy dgamma dbeta workspace?",
            launcher=f"batch_normalize_{name}_bn_reduce",
            takes=taking(*(_backward(n, by_output, reduces=True) for n in AFFINE)),
        )


KERNELS = tuple(_kernels())
