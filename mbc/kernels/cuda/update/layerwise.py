"""LARS and LAMB: the ratio of each parameter's step, and the step, for one parameter or for many in few launches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from mbc.ir.types import Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, THREADS, OwnKernel, Slice
from mbc.kernels.cuda.update.multi_tensor import of_many, settings, takes_together
from mbc.kernels.cuda.wiring import members_of
from mbc.kernels.launch_struct import Struct
from mbc.ops.update import Sgd

FILE = "update/layerwise.cu"
PART_ELEMENTS = 16 * THREADS  # fewest elements of a part of a tensor
MOST_PARTS = 4 * REDUCTION_BLOCKS
SUMS_BYTES = 16  # bytes of the two sums of a part


@dataclass(frozen=True, slots=True)
class LayerwiseArguments(Struct):
    """Integer arguments of a launch, for a ratio or a step.

    `FIELDS` integers for every tensor follow: its elements, its parts, and the numbers of the call's pointers to the
    parameter, the gradient, two states, the written parameter and states, and the ratio; -1: there is none.

    Attributes:
        parts: Parts of all tensors.
        control: Number of the pointer to the control block.
    """

    tensors: int
    parts: int
    control: int
    momentum: int
    nesterov: int


# Operands of each kind of operation, in the order: parameter, gradient, first state, second state; the parameter and
# the two states as they are written; ratio. A number is that of an input; a negative number is -1 - number of an
# output.
_OPERANDS: Mapping[str, tuple[int | None, ...]] = MappingProxyType(
    {
        "lars_ratio": (0, 1, None, None, None, None, None, -1),
        "lars_update": (0, 1, 4, None, -1, -2, None, 3),
        "lamb_ratio": (0, 1, 3, 4, None, -1, -2, -3),
        "lamb_update": (0, None, 2, 3, -1, None, None, 4),
    }
)
_CONTROL: Mapping[str, int] = MappingProxyType({"lars_ratio": 2, "lars_update": 2, "lamb_ratio": 2, "lamb_update": 1})


def _parts(tensor: TensorType) -> int:
    return min(-(-tensor.elements // PART_ELEMENTS), MOST_PARTS)


def _arguments(at: Slice) -> LayerwiseArguments:
    members = members_of(at.request)
    a, control = members[0].attributes, members[0].inputs[_CONTROL[at.request.kind.removesuffix("*")]]
    parts = sum(_parts(at.request.inputs[member.inputs[0]]) for member in members)
    momentum, nesterov = isinstance(a, Sgd) and a.momentum > 0, isinstance(a, Sgd) and a.nesterov
    return LayerwiseArguments(len(members), parts, control, int(momentum), int(nesterov))


def _fields(at: Slice) -> tuple[int, ...]:
    fields: list[int] = []
    for member in members_of(at.request):
        tensor = at.request.inputs[member.inputs[0]]
        fields += [tensor.elements, _parts(tensor)]
        for operand in _OPERANDS[at.request.kind.removesuffix("*")]:
            numbers, place = (
                (member.inputs, operand) if operand is None or operand >= 0 else (member.outputs, -1 - operand)
            )
            fields.append(-1 if place is None or place >= len(numbers) else numbers[place])
    return tuple(fields)


def _workspace(request: Request, layout: Layout) -> int:
    return SUMS_BYTES * sum(_parts(request.inputs[member.inputs[0]]) for member in members_of(request))


def _takes(request: Request) -> bool:
    return takes_together(request, _CONTROL[request.kind.removesuffix("*")])


def _kernels(kind: str) -> Iterator[OwnKernel]:
    alone = OwnKernel(
        kind,
        FILE,
        LayerwiseArguments,
        _arguments,
        settings,
        trailing=_fields,
        launcher=f"multi_tensor_{kind}",
        named=kind,
    )
    if kind.endswith("_ratio"):
        alone = replace(alone, workspace=_workspace, launches=2)
    yield alone
    yield of_many(alone, _takes)


KERNELS = tuple(kernel for kind in _OPERANDS for kernel in _kernels(kind))
