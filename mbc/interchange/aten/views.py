"""Which results of ATen operations share memory with an argument, and how a write to a view returns to its base.

Alias annotations come from the schemas. A few operations return a view only sometimes: for these the strides of the
program decide, as they do in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mbc.interchange.aten.operands import SLICE_ARGUMENTS, Refused, indices_of
from mbc.interchange.aten.operation_schemas import COPYING_RESHAPES, RESHAPES, schema_of
from mbc.interchange.program import Argument, Node, TensorMeta, TensorName

# Operations that return their first argument if there is nothing to do, which their schemas do not state.
_UNANNOTATED: Mapping[str, Callable[[Node], bool]] = {
    **{
        f"aten.{name}.default": lambda node: node.arguments.get("train") is False or node.arguments.get("p") == 0
        for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    },
    "aten.type_as.default": lambda node: True,
}
_COPIES_IF_NEEDED = ("aten.contiguous.", "aten.to.", "aten.type_as.")
_OWN_INVERSE = frozenset(f"aten.{name}.default" for name in ("t", "mT", "numpy_T", "swapaxes", "swapdims")) | {
    "aten.transpose.int"
}
_MOVES = frozenset(f"aten.{name}" for name in ("movedim.int", "movedim.intlist", "moveaxis.int", "moveaxis.intlist"))
_SAME = frozenset(
    f"aten.{name}.default"
    for name in ("alias", "contiguous", "positive", "lift_fresh", "type_as", "dropout", "feature_dropout",
                 "alpha_dropout", "feature_alpha_dropout", "resolve_conj", "resolve_neg")
)  # fmt: skip
_OTHER_WRITE = "write to the tensor itself, or to a slice of it"


def viewed(node: Node, result: int, tensors: Mapping[str, TensorMeta]) -> str | None:
    """Return the argument whose memory a result of a node shares; None if the result has memory of its own."""
    schema = schema_of(node.target)
    parameter = None if schema is None else schema.viewed(result)
    name = parameter.name if parameter is not None else None
    if node.target in _UNANNOTATED and _UNANNOTATED[node.target](node):
        name = next(iter(node.arguments))
    operand = node.arguments.get(name) if name is not None else None
    if not isinstance(operand, TensorName):
        return None
    before, after = tensors.get(operand.name), tensors.get(node.outputs[result])
    if before is not None and after is not None and before.strides is not None and after.strides is not None:
        if node.target in COPYING_RESHAPES and not _can_view(before.sizes, before.strides, after.sizes):
            return None
        if node.target.startswith(_COPIES_IF_NEEDED) and (
            node.arguments.get("copy") is True or (before.dtype, before.strides) != (after.dtype, after.strides)
        ):
            return None
    return name


def _can_view(sizes: tuple[int, ...], strides: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a tensor can have another shape without a copy (PyTorch's `at::detail::computeStride`)."""
    if math.prod(sizes) == 0:
        return sizes == shape
    axes = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    rest = [size for size in shape if size != 1]
    while axes:
        count, stride = axes.pop()
        while axes and axes[-1][1] == count * stride:
            count *= axes.pop()[0]
        part = 1
        while rest and part < count:
            part *= rest.pop()
        if part != count:
            return False
    return True


@dataclass(frozen=True, slots=True)
class ViewStep:
    """A node that gives a view, the number of the result that is the view, and the argument that it views."""

    node: Node
    result: int
    argument: str


def scattered(
    step: ViewStep, base: TensorMeta, tensors: Mapping[str, TensorMeta]
) -> tuple[str, Mapping[str, Argument]] | None:
    """Return the operation that puts a tensor written to a view back into the tensor that is viewed.

    Args:
        step: The node that gave the view.
        base: Shape, strides and type of the tensor that is viewed.
        tensors: Shape, strides and type of each tensor of the program, by name.

    Returns:
        The operation and its arguments without the tensors. If the view is a part, the tensors are `self`, which is
            viewed, and `src`, which was written. If the view has all elements, the only tensor is `self`, which was
            written. None: the written tensor has the base's shape, and replaces the base.

    Raises:
        Refused: No inverse of the view is implemented.
    """
    node, target = step.node, step.node.target
    if target in _SAME or target.startswith("aten.to."):
        return None  # the written tensor is the whole base
    if target in RESHAPES:
        return "aten.view.default", {"size": base.sizes}
    if target in _OWN_INVERSE:
        return target, {key: value for key, value in node.arguments.items() if key != "self"}
    if target in _MOVES:
        ends = {"source": node.arguments.get("destination"), "destination": node.arguments.get("source")}
        return target, ends
    if target == "aten.permute.default":
        dims = _ints(node.arguments.get("dims"))
        order = [dim % len(dims) for dim in dims]
        return target, {"dims": tuple(order.index(axis) for axis in range(len(order)))}
    part = _part(step, base, tensors)
    if part is not None:
        return part
    if target in ("aten.expand.default", "aten.expand_as.default") and tensors[node.outputs[0]].shape == base.shape:
        return None
    raise Refused(f"it writes to the result of {target.removeprefix('aten.').partition('.')[0]}", _OTHER_WRITE)


def _part(
    step: ViewStep, base: TensorMeta, tensors: Mapping[str, TensorMeta]
) -> tuple[str, Mapping[str, Argument]] | None:
    """Return the scatter operation for a view that is a slice or one index along a dimension; None for other views."""
    arguments, target = step.node.arguments, step.node.target
    dim = arguments.get("dim", 0)
    if not isinstance(dim, int):
        return None
    if target == "aten.slice.Tensor":
        given = {key: arguments.get(key, default) for key, default in (("start", None), ("end", None), ("step", 1))}
        return "aten.slice_scatter.default", {"dim": dim, **given}
    if target == "aten.narrow.default":
        start, length = arguments["start"], arguments["length"]
        if isinstance(start, int) and isinstance(length, int):
            start += base.sizes[dim] if start < 0 else 0
            return "aten.slice_scatter.default", {"dim": dim, "start": start, "end": start + length, "step": 1}
    if target == "aten.select.int":
        return "aten.select_scatter.default", {"dim": dim, "index": arguments["index"]}
    if target == "aten.unbind.int":
        return "aten.select_scatter.default", {"dim": dim, "index": step.result}
    if target.startswith(("aten.split.", "aten.split_with_sizes.", "aten.chunk.", "aten.tensor_split.")):
        sizes = [tensors[output].sizes[dim] for output in step.node.outputs]
        start = sum(sizes[: step.result])
        return "aten.slice_scatter.default", {"dim": dim, "start": start, "end": start + sizes[step.result], "step": 1}
    return None


def part_of(step: ViewStep, base: TensorMeta, tensors: Mapping[str, TensorMeta]) -> tuple[int, frozenset[int]] | None:
    """Return the dimension along which a view takes a part, and the indices that it takes; None for other views."""
    part = _part(step, base, tensors)
    if part is None:
        return None
    arguments = part[1]
    dim = arguments["dim"]
    assert isinstance(dim, int)
    size = base.sizes[dim]
    if "index" in arguments:
        index = arguments["index"]
        return (dim % len(base.sizes), frozenset((index % size,))) if isinstance(index, int) else None
    start, end, by = (bound if isinstance(bound, int) else None for bound in map(arguments.get, SLICE_ARGUMENTS))
    return dim % len(base.sizes), frozenset(indices_of(size, start, end, by))


def _ints(value: Argument) -> tuple[int, ...]:
    return tuple(item for item in value if isinstance(item, int)) if isinstance(value, tuple) else ()
