"""Images and one number for each of their channels: products, sums, and their gradients, which are sums over pixels."""

from __future__ import annotations

from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel
from mbc.kernels.cuda.image import ImageArguments, image_arguments
from mbc.kernels.cuda.wiring import members, taking
from mbc.ops.pooling import AveragePool

FILE = "pointwise/broadcast.cu"


def _of_means(request: Request) -> bool:
    """Return whether the group is the gradient of an image with a gate and a mean.

    The image is multiplied by the gate, and its mean over all pixels is taken.
    """
    pools = [m.attributes for m in members(request).members if isinstance(m.attributes, AveragePool)]
    return _wired(request) and all(a.kernel == a.size and not any(a.pad) for a in pools)


# A product, the gradient of a mean, and their sum, in either order.
_wired = taking(*((((0, 1), (2,), summands), (5,)) for summands in ((3, 4), (4, 3))))

KERNELS = (
    *(
        OwnKernel(kind, FILE, ImageArguments, image_arguments, operands=operands)
        for kind, operands in (
            ("broadcast_mul", "x gate y"),
            ("broadcast_add", "x gate y"),
            ("pixel_sum", "x y"),
            ("pixel_dot", "x z y"),
        )
    ),
    OwnKernel(
        "broadcast_mul+avg_pool_backward+add",
        FILE,
        ImageArguments,
        image_arguments,
        operands="x gate mean y",
        launcher="broadcast_mul_add_mean_gradient",
        takes=_of_means,
    ),
)
