"""Fusion groups of a transformer's blocks: a bias and the operation after it, and their gradients.

After the bias there is GELU, a scale for each channel or a residual sum. The gradients come with the sums over them.
The backward pass recomputes the sum with the bias from the operand of that sum.
"""

from __future__ import annotations

from collections.abc import Callable

from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel
from mbc.kernels.cuda.generated.generated_map import generated_as
from mbc.kernels.cuda.image import SumArguments
from mbc.kernels.cuda.norm.batch_norm import sum_arguments, sum_workspace, sums_workspace
from mbc.kernels.cuda.wiring import Wiring, members, taking
from mbc.ops.arithmetic import Broadcast
from mbc.ops.reduce import Reduce

FILE = "fused/bias_activation.cu"


def _scaled(*wirings: Wiring) -> Callable[[Request], bool]:
    """Return a `takes` callback for groups of these wirings that multiply each channel by its own number.

    Any sums of such a group are over whole channels.
    """
    wired = taking(*wirings)

    def takes(request: Request) -> bool:
        channels = request.inputs[0].shape[1:2]
        scales = [m.attributes for m in members(request).members if isinstance(m.attributes, Broadcast)]
        vectors = [t.shape for t in (*request.inputs, *request.outputs) if len(t.shape) < len(request.inputs[0].shape)]
        sums = [m.attributes for m in members(request).members if isinstance(m.attributes, Reduce)]
        whole = all(a.factor == 1.0 and a.shape == channels for a in sums)
        return wired(request) and whole and scales == [Broadcast("mul", 1)] and set(vectors) == {channels}

    return takes


KERNELS = (
    generated_as("bias_add+gelu", "bias_add_gelu", taking((((0, 1), (2,)), (3,)))),
    OwnKernel(
        "bias_add+gelu_backward+channel_sum",
        FILE,
        SumArguments,
        sum_arguments,
        workspace=sum_workspace,
        launches=2,
        accumulates=True,
        launcher="bias_add_gelu_backward_channel_sum",
        takes=taking((((0, 1), (3, 2), (4,)), (4, 5))),
    ),
    generated_as(
        "bias_add+add", "bias_add_add", taking(*((((0, 1), summands), (4,)) for summands in ((3, 2), (2, 3))))
    ),
    generated_as(
        "bias_add+broadcast+add",
        "bias_add_scale_add",
        _scaled(*((((0, 1), (4, 2), summands), (6,)) for summands in ((5, 3), (3, 5)))),
    ),
    OwnKernel(
        "bias_add+broadcast+channel_sum+row_reduce_dot",
        FILE,
        SumArguments,
        sum_arguments,
        workspace=sums_workspace,
        launches=2,
        accumulates=True,
        launcher="scale_backward_bias_sums",
        takes=_scaled((((0, 1), (2, 3), (5,), (2, 4)), (5, 6, 7))),
    ),
)
