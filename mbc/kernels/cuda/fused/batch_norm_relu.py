"""Fusion groups: batch normalization, biases and ReLU with their neighbours, in one pass over memory.

A kernel recognizes its group by its wiring; `mbc.optimize.fusion.catalogue` says where such groups come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, channels_last, image_of, no_reals, touched_us
from mbc.kernels.cuda.generated.generated_map import generated_as
from mbc.kernels.cuda.image import ImageArguments
from mbc.kernels.cuda.norm.batch_norm import FusedSumArguments, fused_sum_arguments, sum_workspace, sums_workspace
from mbc.kernels.cuda.wiring import (
    AFFINE,
    NORMALIZED,
    SECOND,
    Numbers,
    Wiring,
    adds,
    affines,
    eps,
    members,
    run,
    slice_of,
    taking,
)
from mbc.ops.batch_normalize import BatchNormalizeBackward
from mbc.ops.shape import ChannelSlice

FILE = "fused/batch_norm_relu.cu"


@dataclass(frozen=True, slots=True)
class FusedMapArguments(ImageArguments):
    """Integer arguments of a launch that computes an image."""

    affine: int
    affine2: int
    count: int


def _normalize_relu(operands: int) -> Wiring:
    return ((run(0, operands), (operands,)), (operands + 1,))


def _normalize_add_relu(operands: int, swapped: bool) -> Wiring:
    r, z = operands, operands + 1
    return ((run(0, operands), (r, z) if swapped else (z, r), (z + 1,)), (z + 2,))


def _normalize_twice(operands: int, operands2: int, swapped: bool) -> Wiring:
    z = operands + operands2
    add = (z + 1, z) if swapped else (z, z + 1)
    return ((run(0, operands), run(operands, operands2), add, (z + 2,)), (z + 3,))


_ADDED = tuple(_normalize_add_relu(n, swapped) for n in AFFINE for swapped in (False, True))
_TWICE = tuple(_normalize_twice(n, n2, swapped) for n in AFFINE for n2 in AFFINE for swapped in (False, True))


def _with_mask(wiring: Wiring) -> Wiring:
    """Return the wiring of the group that also writes the bit mask of its last result."""
    inputs, (y,) = wiring
    return (*inputs, (y,)), (y, y + 1)


def _through_relu(operands: int, backward: bool, sliced: bool) -> Wiring:
    """Return the wiring of a backward pass through ReLU and batch normalization.

    Its members are the recomputed forward pass, a slice if the gradient is a slice of a wider one (`sliced`),
    relu_backward, and batch_normalize_backward (`backward`) or batch_normalize_backward_reduce.
    """
    outside = operands + (3 if backward else 1)
    y = outside + 1
    dy, d = (y + 1, y + 2) if sliced else (operands, y + 1)
    start = (run(0, operands), (outside,), *(((operands,),) if sliced else ()), (y, dy))
    last = (0, d, 1, 2, *(_of_backward(operands) if backward else ()))
    return (*start, last), run(d + 1, 1 if backward else 2)


def _of_backward(operands: int) -> Numbers:
    """Return dgamma, dbeta and gamma; the first two come right after the gradient."""
    return (operands + 1, operands + 2, *((3,) if operands == 5 else ()))


def _through_relu_and_add(operands: int, swapped: bool, part: bool = False) -> Wiring:
    """Return the wiring that adds a slice of another gradient to the gradient of x.

    `part`: a slice of the sum is written as well.
    """
    dy, wide, z = operands, operands + 3, operands + 4
    y, d, b, a, dx = run(z + 1, 5)
    last = (0, d, 1, 2, *_of_backward(operands))
    start = (run(0, operands), (z,), (y, dy), last, (wide,), (b, a) if swapped else (a, b))
    return ((*start, (dx,)), (dx, dx + 1)) if part else (start, (dx,))


def map_arguments(at: Slice) -> FusedMapArguments:
    """Return the integer arguments of a launch that computes an image."""
    affine, affine2 = (*affines(at.request), 0, 0)[:2]
    backward = (
        m.attributes.count for m in members(at.request).members if isinstance(m.attributes, BatchNormalizeBackward)
    )
    return FusedMapArguments(*image_of(at), affine, affine2, next(backward, 0))


def _mapped(kind: str, launcher: str, operands: str, *wirings: Wiring) -> OwnKernel:
    map_ = OwnKernel(kind, FILE, FusedMapArguments, map_arguments, eps, takes=taking(*wirings), version=2)
    return replace(map_, launcher=launcher, operands=operands)


def _slice_and_part(at: Slice) -> tuple[int, ...]:
    part = members(at.request).members[-1].attributes
    assert isinstance(part, ChannelSlice)
    return *slice_of(at), part.start, part.count


def _with_relu_masks(kernel: OwnKernel) -> OwnKernel:
    """Return the kernel that writes or reads ReLU's bit mask, a byte for eight channels; its versions start at 1."""
    return replace(kernel, layouts=channels_last, version=1)


def _of_slice(kernel: OwnKernel) -> OwnKernel:
    """Return the kernel that reads a slice of a tensor in place; its versions start at 1."""
    return replace(kernel, trailing=slice_of, time_us=touched_us, version=1)


def _summed(
    kind: str,
    launcher: str,
    operands: str,
    *wirings: Wiring,
    workspace: Callable[[Request, Layout], int] = sums_workspace,
    reals: Callable[[Slice], tuple[float, ...]] = eps,
) -> OwnKernel:
    """Return a kernel of reductions: those of batch normalization, unless `workspace` and `reals` say otherwise."""
    return OwnKernel(
        kind,
        FILE,
        FusedSumArguments,
        fused_sum_arguments,
        reals,
        workspace=workspace,
        launches=2,
        accumulates=True,
        operands=f"{operands} workspace?",
        launcher=launcher,
        takes=taking(*wirings),
        version=2,
    )


# Names of operands: of a backward pass, and of reductions.
_BACKWARD = f"{NORMALIZED} dy dgamma dbeta"
_REDUCED = "x mean variance d dgamma dbeta"
_RELU_REMAT = "batch_normalize+relu+relu_backward"
_RELU_REMAT_SLICED = "batch_normalize+relu+channel_slice+relu_backward"

KERNELS = (
    generated_as("batch_normalize+relu", "batch_normalize_relu", taking(*map(_normalize_relu, AFFINE)), version=2),
    generated_as("batch_normalize+add+relu", "batch_normalize_add_relu", taking(*_ADDED), version=2),
    _with_relu_masks(
        _mapped(
            "batch_normalize+add+relu+relu_mask",
            "batch_normalize_add_relu_mask",
            f"{NORMALIZED} r y mask",
            *map(_with_mask, _ADDED),
        )
    ),
    _mapped("batch_normalize*+add+relu", "dual_batch_normalize_add_relu", f"{NORMALIZED} r {SECOND} y", *_TWICE),
    _with_relu_masks(
        _mapped(
            "batch_normalize*+add+relu+relu_mask",
            "dual_batch_normalize_add_relu_mask",
            f"{NORMALIZED} r {SECOND} y mask",
            *map(_with_mask, _TWICE),
        )
    ),
    generated_as("bias_add+relu", "bias_add_relu", taking((((0, 1), (2,)), (3,))), version=2),
    generated_as("add*", "add_three", taking(*adds(3, ((0, 1),)))),
    _mapped(
        f"{_RELU_REMAT}+batch_normalize_backward",
        "batch_normalize_relu_backward",
        f"{_BACKWARD} dx",
        *(_through_relu(n, backward=True, sliced=False) for n in AFFINE),
    ),
    _of_slice(
        _mapped(
            f"{_RELU_REMAT_SLICED}+batch_normalize_backward",
            "batch_normalize_relu_backward_of_slice",
            f"{_BACKWARD} dx",
            *(_through_relu(n, backward=True, sliced=True) for n in AFFINE),
        )
    ),
    _of_slice(
        _mapped(
            f"{_RELU_REMAT}+batch_normalize_backward+channel_slice+add",
            "batch_normalize_relu_backward_add_slice",
            f"{_BACKWARD} wide dx",
            *(_through_relu_and_add(n, swapped) for n in AFFINE for swapped in (False, True)),
        )
    ),
    replace(
        _of_slice(
            _mapped(
                f"{_RELU_REMAT}+batch_normalize_backward+channel_slice+add+channel_slice",
                "batch_normalize_relu_backward_add_slice_and_part",
                f"{_BACKWARD} wide dx part",
                *(_through_relu_and_add(n, swapped, part=True) for n in AFFINE for swapped in (False, True)),
            )
        ),
        trailing=_slice_and_part,
        layouts=channels_last,
    ),
    _summed(
        f"{_RELU_REMAT}+batch_normalize_backward_reduce",
        "batch_normalize_relu_bn_reduce",
        _BACKWARD,
        *(_through_relu(n, backward=False, sliced=False) for n in AFFINE),
    ),
    _of_slice(
        _summed(
            f"{_RELU_REMAT_SLICED}+batch_normalize_backward_reduce",
            "batch_normalize_relu_bn_reduce_of_slice",
            _BACKWARD,
            *(_through_relu(n, backward=False, sliced=True) for n in AFFINE),
        )
    ),
    _summed(
        "relu_backward+batch_normalize_backward_reduce",
        "relu_backward_bn_reduce",
        f"relu dy {_REDUCED}",
        (((0, 1), (2, 5, 3, 4)), (5, 6, 7)),
    ),
    _summed(
        "add+relu_backward+batch_normalize_backward_reduce",
        "add_relu_backward_bn_reduce",
        f"dy dy2 relu {_REDUCED}",
        (((0, 1), (2, 6), (3, 7, 4, 5)), (7, 8, 9)),
    ),
    _with_relu_masks(
        _summed(
            "relu_backward_masked+batch_normalize_backward_reduce",
            "relu_backward_masked_bn_reduce",
            f"dy relu {_REDUCED}",
            (((0, 1), (2, 5, 3, 4)), (5, 6, 7)),
        )
    ),
    _with_relu_masks(
        _summed(
            "add+relu_backward_masked+batch_normalize_backward_reduce",
            "add_relu_backward_masked_bn_reduce",
            f"dy dy2 relu {_REDUCED}",
            (((0, 1), (6, 2), (3, 7, 4, 5)), (7, 8, 9)),
        )
    ),
    _summed(
        "relu_backward+channel_sum",
        "relu_backward_channel_sum",
        "relu dy d sum",
        (((0, 1), (2,)), (2, 3)),
        workspace=sum_workspace,
        reals=no_reals,
    ),
)
