"""Batch normalization of small tensors in one launch forward and one backward.

The forward launch computes statistics and normalizes. The backward launch computes the reductions and the gradient of x
that follows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mbc.hardware.instructions import Instruction
from mbc.ir.types import TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import (
    REDUCTION_BLOCKS,
    THREADS,
    VECTOR_BYTES,
    Channels,
    OwnKernel,
    Slice,
    channels_last,
    type_code,
)
from mbc.kernels.cuda.wiring import AFFINE, NORMALIZED, SCALE_SHIFT, Wiring, eps, members, run, taking
from mbc.kernels.launch_struct import Struct
from mbc.ops.batch_normalize import BatchNormalizeBackward

FILE = "norm/batch_norm_single_launch.cu"

# For larger tensors, the few multiprocessors that share a tile of channels take longer than two launches on all of
# them.
MOST_BYTES = 4 << 20
# Blocks of a cluster, on any GPU with clusters; equal to the constant in
# templates/kernels/norm/batch_norm_single_launch.cuh.
MOST_PARTS = 8
SECTOR, LINE = 2, 4  # vectors that memory reads together
MOST_TILE_VECTORS = 16  # vectors of a tile, in which each channel has a thread


@dataclass(frozen=True, slots=True)
class SingleLaunchArguments(Struct):
    """Integer arguments of a launch of batch normalization, forward or backward.

    Attributes:
        tile_vectors: See batch_norm_single_launch.cuh.
        parts: See batch_norm_single_launch.cuh.
        count: Elements of a channel, in the backward pass.
    """

    type: int
    rows: int
    channels: int
    affine: int
    count: int
    tile_vectors: int
    parts: int


def tiling(x: TensorType, operands: int) -> tuple[int, int]:
    """Return the vectors of a row in a tile, a power of two, and the fewest blocks that can hold the tile's rows."""
    c = Channels.of(x)
    vectors, rows = max(1, c.channels * x.dtype.size_bytes // VECTOR_BYTES), c.rows * c.inner
    held = 2 if operands > 2 else 4  # rows that a thread holds

    def least_parts(tile_vectors: int) -> int:
        parts = 1
        while parts < MOST_PARTS and rows * tile_vectors > parts * THREADS * held:
            parts *= 2
        return parts

    tile_vectors = min(SECTOR, vectors)
    parts = least_parts(tile_vectors)
    if tile_vectors == SECTOR and -(-vectors // tile_vectors) * parts > REDUCTION_BLOCKS:
        tile_vectors = LINE
        parts = least_parts(tile_vectors)
    while tile_vectors < MOST_TILE_VECTORS and -(-vectors // tile_vectors) > REDUCTION_BLOCKS:
        tile_vectors *= 2
    while parts > 1 and -(-vectors // tile_vectors) * parts > REDUCTION_BLOCKS:
        parts //= 2
    return tile_vectors, parts


def _arguments(at: Slice) -> SingleLaunchArguments:
    x = _image(at.request)
    c = Channels.of(x)
    attributes = (member.attributes for member in members(at.request).members)
    count = next((a.count for a in attributes if isinstance(a, BatchNormalizeBackward)), 0)
    tiled = tiling(x, _operands(at.request))
    return SingleLaunchArguments(type_code(x), c.rows * c.inner, c.channels, int(_affine(at.request)), count, *tiled)


def _image(request: Request) -> TensorType:
    """Return the type of the normalized image; the other images have the same shape."""
    return request.inputs[0]


def _operands(request: Request) -> int:
    """Return the number of images that are read."""
    return sum(t.shape == _image(request).shape for t in request.inputs)


def _affine(request: Request) -> bool:
    """Return whether the normalization has a scale, and with it a shift."""
    normal = next(m for m in members(request).members if m.kind in ("batch_normalize", "batch_normalize_backward"))
    return len(normal.inputs) in (5, 7)


def _small(wirings: Iterable[Wiring]) -> Callable[[Request], bool]:
    wired = taking(*wirings)
    return lambda request: _image(request).size_bytes <= MOST_BYTES and wired(request)


def _kernel(kind: str, launcher: str, operands: str, *wirings: Wiring) -> OwnKernel:
    return OwnKernel(
        kind,
        FILE,
        SingleLaunchArguments,
        _arguments,
        eps,
        operands=operands,
        launcher=f"{launcher}_single_launch",
        takes=_small(wirings),
        layouts=channels_last,
        needs=Instruction.CLUSTER,
    )


def _forward(operands: int, relu: bool) -> Wiring:
    m = operands - 2  # after x, scale and shift
    z = m + 2
    start = ((0,), (0, m, m + 1, *run(1, m - 1)))
    return ((*start, (z,)), (m, m + 1, z + 1)) if relu else (start, (m, m + 1, z))


def _forward_add_relu(operands: int, swapped: bool) -> Wiring:
    r = operands - 2
    m, z = r + 1, r + 3
    add = (r, z) if swapped else (z, r)
    return ((0,), (0, m, m + 1, *run(1, r - 1)), add, (z + 1,)), (m, m + 1, z + 2)


def _backward(gamma: bool) -> Wiring:
    operands = (0, 1, 2, 3)  # x, its gradient, mean and variance
    sums = 5 if gamma else 4
    return (operands, (*operands, sums, sums + 1, *run(4, gamma))), run(sums, 3)


def _relu_remat_backward(operands: int) -> Wiring:
    """Return the wiring of a backward pass that recomputes ReLU's output from x."""
    dy, z = operands, operands + 1
    y, d, sums = z + 1, z + 2, z + 3
    start = (run(0, operands), (z,), (y, dy), (0, d, 1, 2))
    return (*start, (0, d, 1, 2, sums, sums + 1, *run(3, operands == 5))), run(sums, 3)


def _relu_backward(gamma: bool, added: bool) -> Wiring:
    """Return the wiring of a backward pass that reads ReLU's stored output; `added`: of the sum of two gradients."""
    y = 2 if added else 0
    x, dy = (3, 6 + gamma) if added else (2, 1)
    d = dy + 1 if added else 5 + gamma
    first = ((0, 1), (y, dy)) if added else ((y, dy),)
    both = (x, d, x + 1, x + 2)
    return (*first, both, (*both, d + 1, d + 2, *run(x + 3, gamma))), run(d, 4)


_SCALED = (True, False)
_STATISTICS = "batch_statistics+batch_normalize"
_FORWARD_OPERANDS = f"x {SCALE_SHIFT} mean variance y"
_SUMS = "batch_normalize_backward_reduce+batch_normalize_backward"

KERNELS = (
    _kernel(_STATISTICS, "batch_normalize", _FORWARD_OPERANDS, *(_forward(n, relu=False) for n in AFFINE)),
    _kernel(
        f"{_STATISTICS}+relu",
        "batch_normalize_relu",
        f"x {SCALE_SHIFT} mean variance y",
        *(_forward(n, relu=True) for n in AFFINE),
    ),
    _kernel(
        f"{_STATISTICS}+add+relu",
        "batch_normalize_add_relu",
        f"x {SCALE_SHIFT} r mean variance y",
        *(_forward_add_relu(n, swapped) for n in AFFINE for swapped in (False, True)),
    ),
    _kernel(
        _SUMS, "batch_normalize_backward", "x dy mean variance gamma?affine dgamma dbeta dx", *map(_backward, _SCALED)
    ),
    _kernel(
        f"batch_normalize+relu+relu_backward+{_SUMS}",
        "batch_normalize_relu_backward",
        f"{NORMALIZED} dy dgamma dbeta dx",
        *map(_relu_remat_backward, AFFINE),
    ),
    _kernel(
        f"relu_backward+{_SUMS}",
        "relu_backward_batch_normalize",
        "relu dy x mean variance gamma?affine d dgamma dbeta dx",
        *(_relu_backward(gamma, added=False) for gamma in _SCALED),
    ),
    _kernel(
        f"add+relu_backward+{_SUMS}",
        "add_relu_backward_batch_normalize",
        "dy dy2 relu x mean variance gamma?affine d dgamma dbeta dx",
        *(_relu_backward(gamma, added=True) for gamma in _SCALED),
    ),
)
