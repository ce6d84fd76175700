"""Fusion groups: batch normalisation with the activation behind it, forward and backward.

The backward pass recomputes the activation's input from x: neither that nor its gradient is ever stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mbc.kernels.cuda.base import OwnKernel, Slice, Struct, image_of
from mbc.kernels.cuda.fused.wiring import AFFINE, Wiring, affines, eps, members, run, taking
from mbc.kernels.cuda.norm.batch_norm import parts, sums_workspace
from mbc.ops.normalization import BatchNormalizeBackward

FILE = "fused/batch_norm_activation.cu"
# Whether an activation's gradient reads its output, and not its input.
BY_OUTPUT = {"silu": False, "hardswish": False, "relu6": True}


@dataclass(frozen=True, slots=True)
class BnActivationArguments(Struct):
    type: int
    layout: int
    rows: int
    channels: int
    inner: int
    affine: int
    count: int


@dataclass(frozen=True, slots=True)
class BnActivationReduceArguments(Struct):
    type: int
    layout: int
    rows: int
    channels: int
    inner: int
    affine: int
    parts: int
    accumulate: int


def _map(at: Slice) -> BnActivationArguments:
    attributes = (member.attributes for member in members(at.request).members)
    count = next((a.count for a in attributes if isinstance(a, BatchNormalizeBackward)), 0)
    return BnActivationArguments(*image_of(at), affines(at.request)[0], count)


def _reduce(at: Slice) -> BnActivationReduceArguments:
    lanes = parts(at.request.inputs[0], at.layout)
    return BnActivationReduceArguments(*image_of(at), affines(at.request)[0], lanes, int(at.accumulate))


def _forward(operands: int) -> Wiring:
    return (run(0, operands), (operands,)), (operands + 1,)


def _backward(operands: int, by_output: bool, reduces: bool) -> Wiring:
    """Batch normalisation and, `by_output`, the activation, recomputed; the activation's gradient; and the reductions
    of batch normalisation's backward pass, or the gradient of x."""
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
        yield OwnKernel(
            forward,
            FILE,
            BnActivationArguments,
            _map,
            eps,
            launcher=f"batch_normalize_{name}",
            takes=taking(*map(_forward, AFFINE)),
        )
        yield OwnKernel(
            f"{backward}+batch_normalize_backward",
            FILE,
            BnActivationArguments,
            _map,
            eps,
            launcher=f"batch_normalize_{name}_backward",
            takes=taking(*(_backward(n, by_output, reduces=False) for n in AFFINE)),
        )
        yield OwnKernel(
            f"{backward}+batch_normalize_backward_reduce",
            FILE,
            BnActivationReduceArguments,
            _reduce,
            eps,
            workspace=sums_workspace,
            launches=2,
            accumulates=True,
            launcher=f"batch_normalize_{name}_bn_reduce",
            takes=taking(*(_backward(n, by_output, reduces=True) for n in AFFINE)),
        )


KERNELS = tuple(_kernels())
