"""One operation on one or on many tensors: parameter updates, casts, moving averages, running statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from mbc.hardware.spec import DeviceSpec
from mbc.ir.graph import Attributes
from mbc.kernels.base import Call, Request
from mbc.kernels.cuda.base import OwnKernel, Slice, channels_first, moved_us, type_code
from mbc.kernels.cuda.wiring import members_of
from mbc.kernels.launch_struct import Struct
from mbc.ops.base import NoAttributes
from mbc.ops.batch_normalize import UpdateRunning
from mbc.ops.fused import Fused
from mbc.ops.layerwise import LarsRatio
from mbc.ops.update import AdamW, Ema, Sgd

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


def same_layouts(call: Call) -> bool:
    """Return whether the operands of each member have one layout.

    Elementwise updates do not depend on the layout, and the search satisfies this condition, since a state and its
    gradient have one layout.
    """
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


def takes_together(request: Request, control: int = 2) -> bool:
    """Return whether members differ only in their tensors, and read one control block as operand `control`."""
    return _alike(request) and _one_control(request, control)


def _takes_running(request: Request) -> bool:
    return _independent(request) and _one_control(request, 4)


def updates(at: Slice) -> MultiTensorUpdateArguments:
    """Return the integer arguments of a launch of updates."""
    members = members_of(at.request)
    inputs, a = members[0].inputs, members[0].attributes
    nesterov = isinstance(a, Sgd) and a.nesterov
    return MultiTensorUpdateArguments(len(members), inputs[2], int(len(inputs) > 3), int(nesterov))


def _fields_of_updates(at: Slice) -> tuple[int, ...]:
    fields: list[int] = []
    for member in members_of(at.request):
        parameter, gradient, _, *states = member.inputs
        fields += [at.request.inputs[parameter].elements, parameter, gradient, *states]
    return tuple(fields)


def settings(at: Slice) -> tuple[float, ...]:
    """Return the floating-point settings of an update; `sgd_settings` and its like in the sources read them."""
    return _settings_of(members_of(at.request)[0].attributes)


def _settings_of(a: Attributes) -> tuple[float, ...]:
    match a:
        case AdamW():
            return a.beta1, a.beta2, a.eps, a.weight_decay, a.rate, a.clip_value
        case Ema():
            return (a.decay,)
        case NoAttributes():
            return ()
        case LarsRatio():
            return a.trust, a.eps, a.weight_decay, a.clip_value
        case _:
            assert isinstance(a, Sgd)
            return a.momentum, a.weight_decay, a.rate, a.clip_value


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


def _runnings(at: Slice) -> MultiTensorUpdateArguments:
    members = members_of(at.request)
    return MultiTensorUpdateArguments(len(members), members[0].inputs[4], momentum=0, nesterov=0)


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


def launches_us(request: Request, device: DeviceSpec) -> float:
    """Return the time of all launches but the first, which `effort_of` adds."""
    return (-(-len(members_of(request)) // MOST_TENSORS) - 1) * device.launch_us


def _time_us(request: Request, device: DeviceSpec) -> float:
    return moved_us(request, device) + launches_us(request, device)


def of_many(alone: OwnKernel, takes: Callable[[Request], bool]) -> OwnKernel:
    """Return the kernel of several operations that has the launcher of the kernel of one."""
    return replace(
        alone, kind=f"{alone.kind}*", layouts=channels_first, accepts_layouts=same_layouts, named="", takes=takes
    )


_CAST = OwnKernel(
    "cast",
    FILE,
    MultiTensorCastArguments,
    _casts,
    trailing=_fields_of_casts,
    time_us=_time_us,
    launcher="multi_tensor_cast",
)
_RUNNING = OwnKernel(
    "update_running",
    FILE,
    MultiTensorUpdateArguments,
    _runnings,
    _momenta,
    trailing=_fields_of_runnings,
    layouts=channels_first,
    time_us=_time_us,
    launcher="multi_tensor_update_running",
    named="update_running",
)


def _update(kind: str) -> Iterator[OwnKernel]:
    alone = OwnKernel(
        kind,
        FILE,
        MultiTensorUpdateArguments,
        updates,
        settings,
        trailing=_fields_of_updates,
        time_us=_time_us,
        launcher=f"multi_tensor_{kind.removesuffix('_update')}",
        named=kind,
    )
    yield alone
    yield of_many(alone, takes_together)


KERNELS = (
    *(kernel for kind in ("sgd_update", "adamw_update", "ema_update", "accumulate") for kernel in _update(kind)),
    of_many(_CAST, _alike),  # one cast may change the layout, too: `convert`
    _RUNNING,
    of_many(_RUNNING, _takes_running),
)
