"""Fused groups: batch normalisation, biases and relu with their neighbours, in one pass over memory.

A kernel knows its group by how the members feed one another; `mbc.optimize.patterns` says where such groups come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.own.base import Channels, OwnKernel, Slice, Struct, layout_code, no_reals, type_code
from mbc.kernels.own.channels import SUM_BYTES, SUMS_BYTES, parts
from mbc.kernels.own.images import PoolArguments, pool_arguments
from mbc.ops.fused import Fused
from mbc.ops.normalization import BatchNormalize, BatchNormalizeBackward
from mbc.ops.pooling import MaxPool

FILE = "fused.cu"

Numbers = tuple[int, ...]
Wiring = tuple[tuple[Numbers, ...], Numbers]  # inputs of each member, and what leaves the group


@dataclass(frozen=True, slots=True)
class FusedMapArguments(Struct):
    type: int
    layout: int
    rows: int
    channels: int
    inner: int
    affine: int
    affine2: int
    count: int


@dataclass(frozen=True, slots=True)
class FusedSumArguments(Struct):
    type: int
    layout: int
    rows: int
    channels: int
    inner: int
    affine: int
    parts: int
    accumulate: int


def _members(request: Request) -> Fused:
    assert isinstance(request.attributes, Fused)
    return request.attributes


def _taking(*wirings: Wiring) -> Callable[[Request], bool]:
    """Takes groups that are wired in one of these ways."""

    def takes(request: Request) -> bool:
        a = _members(request)
        return (tuple(member.inputs for member in a.members), a.given) in wirings

    return takes


def _run(first: int, count: int) -> Numbers:
    return tuple(range(first, first + count))


def _normalize_relu(operands: int) -> Wiring:
    return ((_run(0, operands), (operands,)), (operands + 1,))


def _normalize_relu_pool(operands: int, given: int) -> Wiring:
    return ((_run(0, operands), (operands,), (operands + 1,)), _run(operands + 2, given))


def _normalize_add_relu(operands: int, swapped: bool) -> Wiring:
    r, z = operands, operands + 1
    return ((_run(0, operands), (r, z) if swapped else (z, r), (z + 1,)), (z + 2,))


def _normalize_twice(operands: int, operands2: int, swapped: bool) -> Wiring:
    z = operands + operands2
    add = (z + 1, z) if swapped else (z, z + 1)
    return ((_run(0, operands), _run(operands, operands2), add, (z + 2,)), (z + 3,))


def _through_relu(operands: int, outside: int, last: Callable[[int, int], Numbers], given: int) -> Wiring:
    """The forward pass over again, relu_backward, and a last member: `last(dy, d)` are its inputs."""
    dy, z = operands, outside
    d = z + 2
    return ((_run(0, operands), (z,), (z + 1, dy), last(dy, d)), _run(d + 1, given))


_AFFINE = (5, 3)  # operands of batch_normalize, with scale and shift and without
_THROUGH_SUMS = tuple(_through_relu(n, n + 1, lambda dy, d: (0, d, 1, 2), given=2) for n in _AFFINE)
_THROUGH_BACKWARD = tuple(
    _through_relu(
        n, n + 3, lambda dy, d: (0, d, 1, 2, dy + 1, dy + 2, 3) if dy == 5 else (0, d, 1, 2, dy + 1, dy + 2), given=1
    )
    for n in _AFFINE
)


def _start(at: Slice, operand: int = 0) -> tuple[int, int, int, int, int]:
    x = at.request.inputs[operand]
    c = Channels.of(x)
    return type_code(x), layout_code(at.layout), c.rows, c.channels, c.inner


def _affines(request: Request) -> tuple[int, ...]:
    """Of each batch normalisation of the group: whether it has scale and shift."""
    return tuple(int(len(m.inputs) == 5) for m in _members(request).members if m.kind == "batch_normalize")


def _map(at: Slice) -> FusedMapArguments:
    affine, affine2 = (*_affines(at.request), 0, 0)[:2]
    last = _members(at.request).members[-1].attributes
    count = last.count if isinstance(last, BatchNormalizeBackward) else 0
    return FusedMapArguments(*_start(at), affine, affine2, count)


def _pool(at: Slice) -> PoolArguments:
    last = _members(at.request).members[-1].attributes
    assert isinstance(last, MaxPool)
    return pool_arguments(at, last)


def _sum(at: Slice) -> FusedSumArguments:
    affine = (*_affines(at.request), 0)[0]
    return FusedSumArguments(*_start(at), affine, parts(at.request.inputs[0], at.layout), int(at.accumulate))


def _eps(at: Slice) -> tuple[float, ...]:
    """Of every member that has one, in order."""
    attributes = (member.attributes for member in _members(at.request).members)
    return tuple(a.eps for a in attributes if isinstance(a, BatchNormalize | BatchNormalizeBackward))


def _partial_bytes(request: Request, layout: Layout, state_bytes: int) -> int:
    x = request.inputs[0]
    count = parts(x, layout)
    return count * x.shape[1] * state_bytes if count > 1 else 0


def _sums_workspace(request: Request, layout: Layout) -> int:
    return _partial_bytes(request, layout, SUMS_BYTES)


def _sum_workspace(request: Request, layout: Layout) -> int:
    return _partial_bytes(request, layout, SUM_BYTES)


def _mapped(kind: str, launcher: str, *wirings: Wiring, reals: Callable[[Slice], tuple[float, ...]]) -> OwnKernel:
    return OwnKernel(kind, FILE, FusedMapArguments, _map, reals, launcher=launcher, takes=_taking(*wirings), edition=2)


def _summed(
    kind: str,
    launcher: str,
    *wirings: Wiring,
    workspace: Callable[[Request, Layout], int],
    reals: Callable[[Slice], tuple[float, ...]],
) -> OwnKernel:
    return OwnKernel(
        kind,
        FILE,
        FusedSumArguments,
        _sum,
        reals,
        workspace=workspace,
        launches=2,
        launcher=launcher,
        takes=_taking(*wirings),
        edition=2,
    )


_FORWARD_AGAIN = "batch_normalize+relu+relu_backward"

KERNELS = (
    _mapped("batch_normalize+relu", "batch_normalize_relu", *map(_normalize_relu, _AFFINE), reals=_eps),
    _mapped(
        "batch_normalize+add+relu",
        "batch_normalize_add_relu",
        *(_normalize_add_relu(n, swapped) for n in _AFFINE for swapped in (False, True)),
        reals=_eps,
    ),
    _mapped(
        "batch_normalize*+add+relu",
        "batch_normalize_twice_add_relu",
        *(_normalize_twice(n, n2, swapped) for n in _AFFINE for n2 in _AFFINE for swapped in (False, True)),
        reals=_eps,
    ),
    OwnKernel(
        "batch_normalize+relu+max_pool",
        "pool.cu",
        PoolArguments,
        _pool,
        _eps,
        more=lambda at: _affines(at.request),
        launcher="batch_normalize_relu_max_pool",
        takes=_taking(*(_normalize_relu_pool(n, given) for n in _AFFINE for given in (1, 2))),
    ),
    _mapped("bias_add+relu", "bias_add_relu", (((0, 1), (2,)), (3,)), reals=no_reals),
    _mapped(
        f"{_FORWARD_AGAIN}+batch_normalize_backward",
        "batch_normalize_relu_backward",
        *_THROUGH_BACKWARD,
        reals=_eps,
    ),
    _summed(
        f"{_FORWARD_AGAIN}+batch_normalize_sums",
        "batch_normalize_relu_sums",
        *_THROUGH_SUMS,
        workspace=_sums_workspace,
        reals=_eps,
    ),
    _summed(
        "relu_backward+batch_normalize_sums",
        "relu_backward_sums",
        (((0, 1), (2, 5, 3, 4)), (5, 6, 7)),
        workspace=_sums_workspace,
        reals=_eps,
    ),
    _summed(
        "add+relu_backward+batch_normalize_sums",
        "add_relu_backward_sums",
        (((0, 1), (2, 6), (3, 7, 4, 5)), (7, 8, 9)),
        workspace=_sums_workspace,
        reals=_eps,
    ),
    _summed(
        "relu_backward+channel_sum",
        "relu_backward_channel_sum",
        (((0, 1), (2,)), (2, 3)),
        workspace=_sum_workspace,
        reals=no_reals,
    ),
)
