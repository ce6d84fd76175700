"""Updates of this rank's parts of one or many parameters, for a sharded optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from mbc.hardware.spec import DeviceSpec
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, touched_us
from mbc.kernels.cuda.update.multi_tensor import (
    MultiTensorUpdateArguments,
    launches_us,
    of_many,
    settings,
    takes_together,
    updates,
)
from mbc.kernels.cuda.wiring import members_of

FILE = "update/sharded.cu"


def _fields(at: Slice) -> tuple[int, ...]:
    operands, fields = at.request.inputs, list[int]()
    for member in members_of(at.request):
        parameter, gradient, _, *states = member.inputs
        part, whole = operands[states[0]].elements, operands[parameter].elements
        whole_gradient = int(operands[gradient].elements == whole)
        fields += [part, whole, whole_gradient, parameter, gradient, *states, member.outputs[0]]
    return tuple(fields)


def _time_us(request: Request, device: DeviceSpec) -> float:
    return touched_us(request, device) + launches_us(request, device)


def _kernels() -> Iterator[OwnKernel]:
    for rule in ("sgd", "adamw"):
        alone = OwnKernel(
            f"{rule}_update_part",
            FILE,
            MultiTensorUpdateArguments,
            updates,
            settings,
            trailing=_fields,
            time_us=_time_us,
            launcher=f"multi_tensor_{rule}_part",
            named=f"{rule}_update_part",
        )
        yield alone
        yield of_many(alone, takes_together)


KERNELS = tuple(_kernels())
