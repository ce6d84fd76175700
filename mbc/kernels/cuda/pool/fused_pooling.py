"""Fusion groups with a max pool at one end: ReLU and the operations before it, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mbc.ir.types import Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, OwnKernel, Slice, touched_us
from mbc.kernels.cuda.norm.batch_norm import SUM_BYTES, SUMS_BYTES, partial_bytes, parts
from mbc.kernels.cuda.pool.pooling import PoolArguments, pool_arguments, takes_pool
from mbc.kernels.cuda.wiring import (
    AFFINE,
    NORMALIZED,
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
from mbc.ops.pooling import MaxPool

# Blocks of a channels-last reduction: registers suffice for two blocks on each of 132 multiprocessors.
REDUCING_BLOCKS = 2 * REDUCTION_BLOCKS
FORWARD, BACKWARD, BATCH_NORM = "pool/max_pool.cu", "pool/max_pool_backward.cu", "pool/max_pool_batch_norm.cu"


@dataclass(frozen=True, slots=True)
class NormalizePoolArguments(PoolArguments):
    """Integer arguments of a launch that normalizes and pools."""

    affine: int


@dataclass(frozen=True, slots=True)
class PoolSumArguments(PoolArguments):
    """Integer arguments of a launch of sums over the gradient of a pool; those of a slice follow."""

    affine: int
    parts: int
    accumulate: int


@dataclass(frozen=True, slots=True)
class PoolNormalizeBackwardArguments(PoolArguments):
    """Integer arguments of a launch from a pool's gradient to that of a normalization; those of a slice follow."""

    affine: int
    count: int


def _attributes(request: Request) -> MaxPool:
    return next(m.attributes for m in members(request).members if isinstance(m.attributes, MaxPool))


def _pool(at: Slice) -> PoolArguments:
    return pool_arguments(at, _attributes(at.request))


def _normalize_pool(at: Slice) -> NormalizePoolArguments:
    return NormalizePoolArguments(*_pool(at).integers(), *affines(at.request))


def _pool_stored(at: Slice) -> NormalizePoolArguments:
    """Return the integer arguments of a launch that also writes the pooled image, as its first output."""
    return replace(_normalize_pool(at), option=int(len(at.request.outputs) == 3))


def _image(request: Request) -> TensorType:
    """Return the type of the image that is pooled, or of its gradient."""
    pooled = next(t for t in request.inputs if len(t.shape) > 2)
    return TensorType((*pooled.shape[:2], *_attributes(request).size), pooled.dtype)


def _affine(request: Request) -> int:
    """Return whether the group's batch normalization has scale and shift; a backward pass has the scale alone."""
    last = members(request).members[-1]
    if last.kind == "batch_normalize_backward":
        return int(len(last.inputs) == 7)
    return (*affines(request), 0)[0]


def _sum(at: Slice) -> PoolSumArguments:
    image = _image(at.request)
    blocks = parts(image, at.layout, REDUCING_BLOCKS)
    pool = pool_arguments(at, _attributes(at.request), image).integers()
    return PoolSumArguments(*pool, affine=_affine(at.request), parts=blocks, accumulate=int(at.accumulate))


def _normalize_backward(at: Slice) -> PoolNormalizeBackwardArguments:
    last = members(at.request).members[-1].attributes
    assert isinstance(last, BatchNormalizeBackward)
    return PoolNormalizeBackwardArguments(*_pool(at).integers(), affine=_affine(at.request), count=last.count)


def _workspace(state_bytes: int) -> Callable[[Request, Layout], int]:
    return lambda request, layout: partial_bytes(_image(request), layout, state_bytes, REDUCING_BLOCKS)


def _before_pool(operands: int, members_before: int, given: int) -> Wiring:
    """Return the wiring of a chain from `operands` inputs through single values to a pool."""
    inside = run(operands, members_before)
    return ((run(0, operands), *((value,) for value in inside)), run(operands + members_before, given))


def _chain(operands: int, members_before: int) -> Callable[[Request], bool]:
    return taking(*(_before_pool(operands, members_before, given) for given in (1, 2)))


_wired_stored = taking(
    *((wiring[0], (n + 1, *wiring[1])) for n in AFFINE for given in (1, 2) for wiring in (_before_pool(n, 2, given),))
)


def _takes_stored(request: Request) -> bool:
    """Return whether the pooled image is written as well, and every pixel is in exactly one window."""
    a = _attributes(request)
    disjoint = (
        a.kernel == a.stride and not any(a.pad) and all(n % k == 0 for n, k in zip(a.size, a.kernel, strict=True))
    )
    return disjoint and _wired_stored(request)


def _pool_backward_wiring(inputs: int, last: Numbers, given: Numbers) -> Wiring:
    """Return the wiring of relu_backward of the pooled image, max_pool_backward, and a last member.

    Their values are numbered after `inputs`.
    """
    return ((0, 1), (2, inputs), last), given


def _add_wiring(operands: int, backward: bool, sliced: bool) -> tuple[Wiring, Wiring]:
    """Return the wirings of a backward pass with a sum, one for each order of the summands.

    The members are: batch_normalize and relu, recomputed; max_pool_backward; add (`sliced`: of a slice); relu_backward;
    and batch_normalize_backward (`backward`) or batch_normalize_backward_reduce.
    """
    index, more = operands, operands + 2
    z = operands + (5 if backward else 3)
    y, gathered = z + 1, z + 2
    added = gathered + 1 if sliced else more
    total = gathered + (2 if sliced else 1)
    d = total + 1
    last = (0, d, 1, 2, *((more + 1, more + 2, *((3,) if operands == 5 else ())) if backward else ()))
    start = (run(0, operands), (z,), (index, index + 1), *(((more,),) if sliced else ()))
    leaves = run(d + 1, 1 if backward else 2)
    return ((*start, (added, gathered), (y, total), last), leaves), (
        (*start, (gathered, added), (y, total), last),
        leaves,
    )


def _add_wirings(backward: bool, sliced: bool = False) -> tuple[Wiring, ...]:
    return tuple(wiring for operands in AFFINE for wiring in _add_wiring(operands, backward, sliced))


_NORMALIZE_WIRINGS = (
    _pool_backward_wiring(9, (3, 10, 4, 5, 6, 7, 8), (11,)),
    _pool_backward_wiring(8, (3, 9, 4, 5, 6, 7), (10,)),
)

_ADDED = f"{NORMALIZED} index dy dy2"  # operands of groups that add another gradient, dy2, to that of the pool
_RELU_POOL_BACKWARD = "relu_backward+max_pool_backward"
_ADD_RELU_BACKWARD = "batch_normalize+relu+max_pool_backward+add+relu_backward"
_ADD_SLICE_RELU_BACKWARD = "batch_normalize+relu+max_pool_backward+channel_slice+add+relu_backward"


def _forward(kind: str, launcher: str, operands: str, takes: Callable[[Request], bool]) -> OwnKernel:
    return OwnKernel(kind, FORWARD, PoolArguments, _pool, operands=operands, launcher=launcher, takes=takes)


def _summed(kind: str, file: str, launcher: str, operands: str, *wirings: Wiring) -> OwnKernel:
    state_bytes = SUMS_BYTES if "dgamma" in operands else SUM_BYTES
    return OwnKernel(
        kind,
        file,
        PoolSumArguments,
        _sum,
        eps,
        operands=operands,
        workspace=_workspace(state_bytes),
        launches=2,
        accumulates=True,
        launcher=launcher,
        takes=taking(*wirings),
        version=2,
    )


def _normalized(kind: str, launcher: str, operands: str, *wirings: Wiring) -> OwnKernel:
    return OwnKernel(
        kind,
        BATCH_NORM,
        PoolNormalizeBackwardArguments,
        _normalize_backward,
        eps,
        operands=operands,
        launcher=launcher,
        takes=taking(*wirings),
        version=2,
    )


def _with_slice(kernel: OwnKernel) -> OwnKernel:
    """Return the kernel whose other summand is a slice, which is read in place."""
    return replace(kernel, trailing=slice_of, time_us=touched_us)


_KERNELS = (
    _forward("relu+max_pool", "relu_max_pool", "x y index?option", _chain(1, 1)),
    _forward("bias_add+relu+max_pool", "bias_add_relu_max_pool", "x bias y index?option", _chain(2, 2)),
    OwnKernel(
        "batch_normalize+relu+max_pool",
        FORWARD,
        NormalizePoolArguments,
        _normalize_pool,
        eps,
        operands=f"{NORMALIZED} y index?option",
        launcher="batch_normalize_relu_max_pool",
        takes=taking(*(_before_pool(n, 2, given) for n in AFFINE for given in (1, 2))),
        version=2,
    ),
    OwnKernel(
        "batch_normalize+relu+max_pool",
        FORWARD,
        NormalizePoolArguments,
        _pool_stored,
        eps,
        operands=f"{NORMALIZED} image y index?option",
        launcher="batch_normalize_relu_and_max_pool",
        takes=_takes_stored,
    ),
    OwnKernel(
        _RELU_POOL_BACKWARD,
        BACKWARD,
        PoolArguments,
        _pool,
        launcher="relu_max_pool_backward",
        takes=taking((((0, 1), (2, 3)), (4,))),
    ),
    *(
        OwnKernel(kind, BACKWARD, PoolArguments, _pool, launcher=launcher, takes=taking(*adds(2 + many, ((0, 1),))))
        for many, kind, launcher in (
            (1, "max_pool_backward+add", "max_pool_backward_add"),
            (2, "max_pool_backward+add*", "max_pool_backward_add_two"),
            (3, "max_pool_backward+add*", "max_pool_backward_add_three"),
        )
    ),
    _summed(
        f"{_RELU_POOL_BACKWARD}+channel_sum",
        BACKWARD,
        "relu_max_pool_backward_channel_sum",
        "relu dy index d sum workspace?",
        _pool_backward_wiring(3, (4,), (4, 5)),
    ),
    _summed(
        f"{_RELU_POOL_BACKWARD}+batch_normalize_backward_reduce",
        BATCH_NORM,
        "relu_max_pool_backward_bn_reduce",
        "relu dy index x mean variance dgamma dbeta workspace?",
        _pool_backward_wiring(6, (3, 7, 4, 5), (8, 9)),
    ),
    _normalized(
        f"{_RELU_POOL_BACKWARD}+batch_normalize_backward",
        "relu_max_pool_backward_bn_backward",
        "relu dy index x mean variance dgamma dbeta gamma?affine dx",
        *_NORMALIZE_WIRINGS,
    ),
    _summed(
        f"{_ADD_RELU_BACKWARD}+batch_normalize_backward_reduce",
        BATCH_NORM,
        "max_pool_backward_add_bn_reduce",
        f"{_ADDED} dgamma dbeta workspace?",
        *_add_wirings(backward=False),
    ),
    _normalized(
        f"{_ADD_RELU_BACKWARD}+batch_normalize_backward",
        "max_pool_backward_add_bn_backward",
        f"{_ADDED} dgamma dbeta dx",
        *_add_wirings(backward=True),
    ),
    _with_slice(
        _summed(
            f"{_ADD_SLICE_RELU_BACKWARD}+batch_normalize_backward_reduce",
            BATCH_NORM,
            "max_pool_backward_add_slice_bn_reduce",
            f"{_ADDED} dgamma dbeta workspace?",
            *_add_wirings(backward=False, sliced=True),
        )
    ),
    _with_slice(
        _normalized(
            f"{_ADD_SLICE_RELU_BACKWARD}+batch_normalize_backward",
            "max_pool_backward_add_slice_bn_backward",
            f"{_ADDED} dgamma dbeta dx",
            *_add_wirings(backward=True, sliced=True),
        )
    ),
)


def _with_pool(kernel: OwnKernel) -> OwnKernel:
    def takes(request: Request) -> bool:
        return kernel.takes(request) and takes_pool(request)

    return replace(kernel, takes=takes)


KERNELS = tuple(map(_with_pool, _KERNELS))
