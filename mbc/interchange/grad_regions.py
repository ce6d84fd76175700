"""Regions of a program, such as `with torch.no_grad()`, replaced by their operations.

`torch.export` makes each region one operation with a graph of its own. The results of a region without gradients are
detached. A region that turns autocast off computes in the types of its operands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mbc.interchange.program import Argument, Node, Program, Subgraph, TensorMeta, TensorName, with_names

_GRADIENTS = "higher_order.wrap_with_set_grad_enabled"
_AUTOCAST = "higher_order.wrap_with_autocast"
_GRADIENTS_AGAIN = (
    "it turns gradients on inside of a region without gradients",
    "compute it outside of torch.no_grad()",
)
_AUTOCAST_ON = (
    "it computes in a lower precision in this region",
    "leave autocast out while the model is imported, and choose the type with train { precision = bf16 }",
)


def inline_regions(program: Program) -> Program:
    """Return a program with the nodes of its regions in their place, under new names."""
    tensors = dict(program.tensors)
    nodes = tuple(_inlined(program.nodes, tensors, gradients=True))
    return replace(program, nodes=nodes, tensors=tensors)


def _inlined(nodes: tuple[Node, ...], tensors: dict[str, TensorMeta], gradients: bool) -> Iterator[Node]:
    for node in nodes:
        graph = next((a for a in node.arguments.values() if isinstance(a, Subgraph)), None)
        if graph is None or node.target not in (_GRADIENTS, _AUTOCAST):
            yield replace(node, has_gradients=gradients)
        elif node.target == _AUTOCAST and node.arguments.get("2") is True:
            yield replace(node, refusal=_AUTOCAST_ON)
        else:
            enabled = gradients if node.target == _AUTOCAST else node.arguments.get("0") is True
            if enabled and not gradients:
                yield replace(node, refusal=_GRADIENTS_AGAIN)
            else:
                yield from _region(node, graph, tensors, gradients, enabled)


def _region(node: Node, graph: Subgraph, tensors: dict[str, TensorMeta], outside: bool, inside: bool) -> Iterator[Node]:
    """Yield the nodes of a region, and one node for each of its results.

    Args:
        node: The node of the region.
        graph: The region's graph.
        tensors: Shapes and types; those of the region are added.
        outside: Whether gradients flow outside of the region.
        inside: Whether gradients flow inside of the region.

    Yields:
        A node.
    """
    values = tuple(node.arguments.values())
    operands = values[next(i for i, value in enumerate(values) if value is graph) + 1 :]
    names = {inner: _name(operand) for inner, operand in zip(graph.inputs, operands, strict=False)}
    scope = node.outputs[0] if node.outputs else node.name
    for inner, meta in graph.tensors.items():
        if inner not in names:
            names[inner] = f"{scope}/{inner}"
            tensors[names[inner]] = meta
    body = tuple(_renamed(inner, names) for inner in graph.nodes)
    yield from _inlined(body, tensors, inside)
    result = "aten.detach.default" if outside and not inside else "aten.alias.default"
    for outer, inner in zip(node.outputs, graph.outputs, strict=True):
        arguments: Mapping[str, Argument] = {"self": TensorName(names[inner])}
        yield Node(result, arguments, (outer,), node.modules, node.line, node.name, has_gradients=outside)


def _name(operand: Argument) -> str:
    return operand.name if isinstance(operand, TensorName) else ""


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    outputs = tuple(names.get(name, name) for name in node.outputs)
    return replace(with_names(node, lambda name: names.get(name, name)), outputs=outputs)
