"""One operation on each of many tensors: parameter updates, casts, moving averages, running statistics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout
from mbc.kernels.base import Call, Request
from mbc.kernels.cuda.base import Layouts, OwnKernel, Slice, moved_us, type_code
from mbc.kernels.cuda.update.optimizer import update_reals
from mbc.kernels.launch_struct import Struct
from mbc.ops.fused import Fused, Member
from mbc.ops.normalization import UpdateRunning
from mbc.ops.update import Sgd

FILE = "update/multi_tensor.cu"
MOST_TENSORS = 64  # tensors of a launch; equal to the constant in the source


@dataclass(frozen=True, slots=True)
class MultiTensorUpdateArguments(Struct):
    """Integer arguments of a launch of updates.

    Attributes:
        control: Number of the pointer to the control block.
    """

    tensors: int
    control: int
    momentum: int
    nesterov: int


@dataclass(frozen=True, slots=True)
class MultiTensorCastArguments(Struct):
    """Integer arguments of a launch of casts."""

    tensors: int
    from_type: int
    to_type: int


@dataclass(frozen=True, slots=True)
class MultiTensorUpdateRunningArguments(Struct):
    """Integer arguments of a launch that updates running statistics."""

    tensors: int
    control: int


def members_of(request: Request) -> tuple[Member, ...]:
    """Return the operations of a group."""
    assert isinstance(request.attributes, Fused)
    return request.attributes.members


def any_layouts(request: Request) -> Iterable[Layouts]:
    """Yield all operands channels first, which stands for any layouts.

    Elementwise updates do not depend on the layout. The search satisfies `same_layouts`, since a state and its gradient
    have one layout.
    """
    yield (Layout.CHANNELS_FIRST,) * (len(request.inputs) + len(request.outputs))


def same_layouts(call: Call) -> bool:
    """Return whether the operands of each member have one layout."""
    results = {number: len(call.request.inputs) + at for at, number in enumerate(_given(call.request))}
    for member in members_of(call.request):
        operands = (results.get(number, number) for number in (*member.inputs, *member.outputs))
        if len({call.layouts[at] for at in operands if call.operands[at].ordered}) > 1:
            return False
    return True


def _given(request: Request) -> tuple[int, ...]:
    assert isinstance(request.attributes, Fused)
    return request.attributes.given


def _independent(request: Request) -> bool:
    """Return whether no member reads the result of another one, and the group outputs all of them."""
    a = request.attributes
    assert isinstance(a, Fused)
    results = tuple(number for member in a.members for number in member.outputs)
    return a.given == results and all(n < len(request.inputs) for member in a.members for n in member.inputs)


def _alike(request: Request) -> bool:
    """Return whether members are independent and have the same settings, types and number of operands."""
    members = members_of(request)
    types = {(request.inputs[m.inputs[0]].dtype, request.outputs[0].dtype) for m in members}
    alike = len({(m.attributes, len(m.inputs)) for m in members}) == 1
    return alike and len(types) == 1 and _independent(request)


def _one_control(request: Request, operand: int) -> bool:
    return len({member.inputs[operand] for member in members_of(request)}) == 1


def takes_together(request: Request, control: int) -> bool:
    """Return whether members differ only in their tensors, and read one control block as operand `control`."""
    return _alike(request) and _one_control(request, control)


def takes_updates(request: Request) -> bool:
    """Return whether the members are updates that differ only in their tensors."""
    return takes_together(request, 2)


def _takes_running(request: Request) -> bool:
    return _independent(request) and _one_control(request, 4)


def _updates(at: Slice) -> MultiTensorUpdateArguments:
    first = members_of(at.request)[0]
    a = first.attributes
    nesterov = isinstance(a, Sgd) and a.nesterov
    return MultiTensorUpdateArguments(
        len(members_of(at.request)), first.inputs[2], int(len(first.inputs) > 3), int(nesterov)
    )


def _fields_of_updates(at: Slice) -> tuple[int, ...]:
    fields: list[int] = []
    for member in members_of(at.request):
        parameter, gradient, _, *states = member.inputs
        fields += [at.request.inputs[parameter].elements, parameter, gradient, *states]
    return tuple(fields)


def _settings(at: Slice) -> tuple[float, ...]:
    return update_reals(members_of(at.request)[0].attributes)


def _casts(at: Slice) -> MultiTensorCastArguments:
    request = at.request
    return MultiTensorCastArguments(
        len(members_of(request)), type_code(request.inputs[0]), type_code(request.outputs[0])
    )


def _fields_of_casts(at: Slice) -> tuple[int, ...]:
    """Return elements, input and output of each cast; outputs are numbered after all inputs."""
    return tuple(
        field
        for member in members_of(at.request)
        for field in (at.request.inputs[member.inputs[0]].elements, member.inputs[0], member.outputs[0])
    )


def _runnings(at: Slice) -> MultiTensorUpdateRunningArguments:
    members = members_of(at.request)
    return MultiTensorUpdateRunningArguments(len(members), members[0].inputs[4])


def _fields_of_runnings(at: Slice) -> tuple[int, ...]:
    fields: list[int] = []
    for member in members_of(at.request):
        a = member.attributes
        assert isinstance(a, UpdateRunning)
        fields += [at.request.inputs[member.inputs[0]].elements, *member.inputs[:4], a.count]
    return tuple(fields)


def _momenta(at: Slice) -> tuple[float, ...]:
    attributes = (member.attributes for member in members_of(at.request))
    return tuple(a.momentum for a in attributes if isinstance(a, UpdateRunning))


def _time_us(request: Request, device: DeviceSpec) -> float:
    """Return the estimated time, including all launches but the first, which `effort_of` adds."""
    launches = -(-len(members_of(request)) // MOST_TENSORS)
    return moved_us(request, device) + (launches - 1) * device.launch_us


KERNELS = (
    *(
        OwnKernel(
            f"{kind}*",
            FILE,
            MultiTensorUpdateArguments,
            _updates,
            _settings,
            trailing=_fields_of_updates,
            layouts=any_layouts,
            accepts_layouts=same_layouts,
            time_us=_time_us,
            launcher=f"multi_tensor_{kind.removesuffix('_update')}",
            takes=takes_updates,
        )
        for kind in ("sgd_update", "adamw_update", "ema_update", "accumulate")
    ),
    OwnKernel(
        "cast*",
        FILE,
        MultiTensorCastArguments,
        _casts,
        trailing=_fields_of_casts,
        layouts=any_layouts,
        accepts_layouts=same_layouts,
        time_us=_time_us,
        launcher="multi_tensor_cast",
        takes=_alike,
    ),
    OwnKernel(
        "update_running*",
        FILE,
        MultiTensorUpdateRunningArguments,
        _runnings,
        _momenta,
        trailing=_fields_of_runnings,
        layouts=any_layouts,
        accepts_layouts=same_layouts,
        time_us=_time_us,
        launcher="multi_tensor_update_running",
        takes=_takes_running,
    ),
)
