"""Updates of this rank's parts of one or many parameters, for a sharded optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.hardware.spec import DeviceSpec
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, touched_us
from mbc.kernels.cuda.update.multi_tensor import MOST_TENSORS, any_layouts, same_layouts, takes_updates
from mbc.kernels.cuda.update.optimizer import update_reals
from mbc.kernels.launch_struct import Struct
from mbc.ops.fused import Fused, Member
from mbc.ops.update import Sgd

FILE = "update/sharded.cu"


@dataclass(frozen=True, slots=True)
class ShardedUpdateArguments(Struct):
    """Integer arguments of a launch of updates.

    Attributes:
        control: Number of the pointer to the control block.
    """

    tensors: int
    control: int
    nesterov: int


def _members(request: Request) -> tuple[Member, ...]:
    """Return the members of a group, or the operation itself; operands are numbered as the pointers of a call."""
    attributes, inputs = request.attributes, len(request.inputs)
    if isinstance(attributes, Fused):
        return attributes.members
    results = tuple(range(inputs, inputs + len(request.outputs)))
    return (Member(request.kind, attributes, tuple(range(inputs)), results),)


def _arguments(at: Slice) -> ShardedUpdateArguments:
    members = _members(at.request)
    a = members[0].attributes
    return ShardedUpdateArguments(len(members), members[0].inputs[2], int(isinstance(a, Sgd) and a.nesterov))


def _fields(at: Slice) -> tuple[int, ...]:
    operands, fields = at.request.inputs, list[int]()
    for member in _members(at.request):
        parameter, gradient, _, *states = member.inputs
        part, whole = operands[states[0]].elements, operands[parameter].elements
        whole_gradient = int(operands[gradient].elements == whole)
        fields += [part, whole, whole_gradient, parameter, gradient, *states, member.outputs[0]]
    return tuple(fields)


def _reals(at: Slice) -> tuple[float, ...]:
    return update_reals(_members(at.request)[0].attributes)


def _time_us(request: Request, device: DeviceSpec) -> float:
    """Return the estimated time, including all launches but the first, which `effort_of` adds."""
    launches = -(-len(_members(request)) // MOST_TENSORS)
    return touched_us(request, device) + (launches - 1) * device.launch_us


KERNELS = (
    *(
        OwnKernel(
            f"{rule}_update_part",
            FILE,
            ShardedUpdateArguments,
            _arguments,
            _reals,
            trailing=_fields,
            time_us=_time_us,
            launcher=f"multi_tensor_{rule}_part",
            named=f"{rule}_update_part",
        )
        for rule in ("sgd", "adamw")
    ),
    *(
        OwnKernel(
            f"{rule}_update_part*",
            FILE,
            ShardedUpdateArguments,
            _arguments,
            _reals,
            trailing=_fields,
            layouts=any_layouts,
            accepts_layouts=same_layouts,
            time_us=_time_us,
            launcher=f"multi_tensor_{rule}_part",
            takes=takes_updates,
        )
        for rule in ("sgd", "adamw")
    ),
)
