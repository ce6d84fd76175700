"""A launch of a plan as kernel providers see it: types of the rows that it works on, layouts, settings, workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mbc.ir.graph import Operation
from mbc.ir.types import TensorType
from mbc.kernels.base import Call, Request
from mbc.ops.base import NoAttributes
from mbc.plan.group import operation_of
from mbc.plan.model import Access, Kernel, Launch, Mode, Plan


def call_of(plan: Plan, launch: Launch, operations: Mapping[str, Operation]) -> Call:
    """Return the call of a launch whose work is a kernel; `operations` are those of its program by name."""
    kernel, operands, workspace_bytes = launch.work, launch.accesses, 0
    assert isinstance(kernel, Kernel)
    if operands and plan.buffers[operands[-1].buffer].value is None:
        workspace_bytes = plan.buffers[operands[-1].buffer].size_bytes
        operands = operands[:-1]
    request = (
        _operation_request(plan, operation_of(launch, operations, plan.buffers), operands)
        if launch.operations
        else _conversion_request(plan, kernel, operands)
    )
    layouts = tuple(plan.buffers[access.buffer].layout for access in operands)
    accumulate = any(access.mode is Mode.ACCUMULATE for access in operands)
    return Call(request, kernel.name, kernel.settings, layouts, accumulate, workspace_bytes)


def _operation_request(plan: Plan, operation: Operation, operands: Sequence[Access]) -> Request:
    """Return the request of an operation for the rows of its launch, which the per-sample accesses say."""
    types: list[TensorType] = []
    for name, access in zip((*operation.inputs, *operation.outputs), operands, strict=True):
        value = plan.graph.values[name]
        types.append(value.type.with_rows(access.rows.count) if value.per_sample else value.type)
    count = len(operation.inputs)
    inputs, outputs = tuple(types[:count]), tuple(types[count:])
    return Request(operation.kind, operation.attributes, inputs, outputs, plan.graph.precision)


def _conversion_request(plan: Plan, kernel: Kernel, operands: Sequence[Access]) -> Request:
    """Return the request of a change of layout or type: one value in two buffers.

    The shape is that of the result, because the result may be a view of the source.
    """
    source, result = (_type_of(plan, access) for access in operands)
    source = TensorType(result.shape, source.dtype)
    return Request(kernel.name, NoAttributes(), (source,), (result,), plan.graph.precision)


def _type_of(plan: Plan, access: Access) -> TensorType:
    buffer = plan.buffers[access.buffer]
    assert buffer.value is not None
    value = plan.graph.values[buffer.value]
    type_ = value.type.with_rows(access.rows.count) if value.per_sample else value.type
    return TensorType(type_.shape, buffer.dtype)
