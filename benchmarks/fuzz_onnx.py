"""ONNX models as inputs, changed node by node: graphs of all operators that mbc or common exporters write."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_mutations import LARGEST, NUMBERS, TEXTS, change_bytes
from fuzz_rule import check_text

from mbc.errors import MbcError
from mbc.interchange.from_onnx.package import onnx

SIZES = (-(2**63), -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 1000, 2**16, 2**31, 2**40, 2**62, 2**63 - 1)
# Layers as exporters spell them out: nodes of one graph from `x` [2, 4, 8, 8], each "operator inputs -> outputs".
_SPELT = (
    "Sigmoid x -> s", "Mul x s -> a", "Div a root -> d", "Erf d -> e", "Add e one -> f", "Mul a f -> g",
    "Mul g half -> h", "Shape h -> n", "Gather n zero -> r", "Unsqueeze r zeros -> u", "Concat u rest -> c",
    "Reshape h c -> p", "InstanceNormalization p scale shift -> i", "Reshape i n -> q", "Mul q gamma -> w",
    "Resize w nothing nothing size -> z", "Cast z -> k", "Clip k least most -> l", "Pad l pads -> o",
    "Slice o zeros twos twos -> b", "Conv b weight bias -> v", "Softmax v -> y",
)  # fmt: skip


def models() -> list[bytes]:
    """Return the seed models: one for each network of the tests of the export, and one as exporters write it."""
    from mbc.frontend.lower import lower
    from mbc.frontend.parse import parse
    from mbc.interchange.to_onnx.export import build_model
    from mbc.ir.types import Precision
    from mbc.passes.training_step import differentiate
    from mbc.source import Source
    from tests.interchange.bodies import BODIES, HEAD, TAIL

    items: list[bytes] = []
    for body in BODIES.values():
        created = lower(parse(Source("net.mbc", f"{HEAD}{body}\n{TAIL}")))
        graph = differentiate(created.network, created.optimizer, Precision.FP32)
        states = {s.value: np.ones(graph.values[s.value].type.shape, np.float32) for s in graph.states}
        items.append(build_model(graph, states).SerializeToString())
    return [*items, _spelt().SerializeToString()]


def _spelt() -> Any:
    package = onnx()
    helper = package.helper
    nodes: list[Any] = []
    for line in _SPELT:
        (kind, *inputs), output = (side.split() for side in line.split("->"))
        more = {"Cast": {"to": 1}, "Concat": {"axis": 0}, "Resize": {"mode": "nearest"}}.get(kind, {})
        nodes.append(helper.make_node(kind, ["" if i == "nothing" else i for i in inputs], output, f"/{kind}", **more))
    whole = {
        "zero": 0, "zeros": [0], "twos": [2], "rest": [2, -1, 16], "size": [2, 4, 16, 16], "pads": [0] * 8,
    }  # fmt: skip
    real = {
        "root": 2**0.5, "one": 1, "half": 0.5, "scale": [1] * 2, "shift": [0] * 2, "gamma": np.ones((4, 1, 1)),
        "least": 0, "most": 6, "weight": np.ones((4, 4, 1, 1)), "bias": [0] * 4,
    }  # fmt: skip
    held = [package.numpy_helper.from_array(np.array(v, np.int64), k) for k, v in whole.items()]
    held += [package.numpy_helper.from_array(np.array(v, np.float32), k) for k, v in real.items()]
    inputs = [helper.make_tensor_value_info("x", 1, [2, 4, 8, 8])]
    graph = helper.make_graph(nodes, "net", inputs, [helper.make_tensor_value_info("y", 1, None)], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


@functools.cache
def _operators() -> list[str]:
    from mbc.interchange.from_onnx.read import NOT_TAKEN, RULES

    named = {schema.name for schema in onnx().defs.get_all_schemas()}
    return [*sorted(RULES) * 3, *sorted(NOT_TAKEN), *sorted(named)]


def change_onnx(data: bytes, draw: random.Random) -> bytes:
    """Return a model with changed nodes, edges, attributes, shapes or weights; one in eight is changed as bytes."""
    wrong = onnx("google.protobuf.message").DecodeError
    try:
        model = onnx().ModelProto.FromString(data)
    except (wrong, ValueError):
        return change_bytes(data, draw)
    if not model.graph.node or draw.random() < 0.125:
        return change_bytes(data, draw)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        draw.choice((_node, _node, _edge, _edge, _attribute, _attribute, _attribute, _numbers, _numbers, _whole))(
            model, draw
        )
    return model.SerializeToString()[:LARGEST]


def _node(model: Any, draw: random.Random) -> None:
    nodes = model.graph.node
    at = draw.randrange(len(nodes))
    how = draw.randrange(5)
    if how <= 1:
        nodes[at].op_type = draw.choice(_operators())
    elif how == 2 and len(nodes) > 1:
        del nodes[at]
    elif how == 3:
        nodes.insert(draw.randrange(len(nodes) + 1), nodes[at])
    else:
        setattr(nodes[at], draw.choice(("name", "domain", "op_type")), draw.choice(TEXTS))


def _edge(model: Any, draw: random.Random) -> None:
    """Replace an edge's value, leave the edge out or double it; or do so with a node's result."""
    graph = model.graph
    names = [*(n for node in graph.node for n in (*node.input, *node.output)), *(i.name for i in graph.initializer), ""]
    node = draw.choice(graph.node)
    ends = node.output if draw.random() < 0.1 else node.input
    if not ends or draw.random() < 0.2:
        ends.append(draw.choice(names))
    elif draw.random() < 0.2:
        del ends[draw.randrange(len(ends))]
    else:
        ends[draw.randrange(len(ends))] = draw.choice(names)


def _attribute(model: Any, draw: random.Random) -> None:
    """Change the value, name or type of an attribute, or add one; nodes without attributes get another node's."""
    kinds = onnx().AttributeProto
    given = [(node, a) for node in model.graph.node for a in node.attribute]
    if not given:
        return
    node, attribute = draw.choice(given)
    how = draw.randrange(8)
    if how == 0:
        node.attribute.remove(attribute)
    elif how == 1:
        draw.choice(model.graph.node).attribute.append(attribute)
    elif how == 2:
        attribute.name = draw.choice(given)[1].name
    elif how == 3:
        attribute.type = draw.choice(kinds.AttributeType.values())
    elif attribute.ints:
        at = draw.randrange(len(attribute.ints))
        if draw.random() < 0.2:
            del attribute.ints[at]
        else:
            attribute.ints[at] = draw.choice(SIZES)
    elif attribute.type == kinds.INT:
        attribute.i = draw.choice(SIZES)
    elif attribute.type == kinds.FLOAT:
        attribute.f = draw.choice((0.0, -1.0, 1e-38, 3e38, float("inf"), float("nan"), 0.5, 2.0))
    elif attribute.type == kinds.STRING:
        attribute.s = draw.choice(TEXTS).encode("utf-8", "replace")


def _numbers(model: Any, draw: random.Random) -> None:
    """Change a weight: its shape, type, name, elements, bytes, or the file that holds it."""
    kinds = onnx().TensorProto
    held = model.graph.initializer
    if not held:
        return
    tensor = draw.choice(held)
    how = draw.randrange(8)
    if how <= 1 and tensor.dims:
        tensor.dims[draw.randrange(len(tensor.dims))] = draw.choice(SIZES)
    elif how == 2:
        tensor.data_type = draw.choice((*kinds.DataType.values(), 99))
    elif how == 3 and tensor.raw_data:
        tensor.raw_data = change_bytes(tensor.raw_data, draw)
    elif how == 4:
        if tensor.data_type == kinds.INT64:
            count = max(1, len(tensor.raw_data) // 8)
            created = np.array([draw.choice(SIZES) for _ in range(count)], np.int64)
        else:
            created = np.full(max(1, len(tensor.raw_data) // 4), float(np.float32(draw.choice((0, 1e38, "nan", 2)))))
            created = created.astype(np.float32)
        tensor.raw_data = created.tobytes()
    elif how == 5:
        tensor.data_location = kinds.EXTERNAL
        location = draw.choice((*TEXTS, "model.onnx", ".", "model.onnx/x"))
        more = {"offset": str(draw.choice(NUMBERS)), "length": str(draw.choice(NUMBERS))}
        for key, value in {"location": location, **(more if draw.random() < 0.5 else {})}.items():
            tensor.external_data.add(key=key, value=value[:60])
    elif how == 6:
        tensor.name = draw.choice((*TEXTS, draw.choice(held).name))
    else:
        tensor.dims.append(draw.choice((1, 1, 2, 4)))


def _whole(model: Any, draw: random.Random) -> None:
    """Change the model's inputs, outputs or operator sets."""
    graph = model.graph
    how = draw.randrange(5)
    if how == 0 and model.opset_import:
        model.opset_import[0].version = draw.choice((0, 7, 11, 13, 18, 20, 21, 23, 99, 2**62))
    elif how == 1 and graph.output:
        graph.output[0].name = draw.choice([*(n for node in graph.node for n in node.output), *TEXTS])
    elif how == 2 and graph.input:
        tensor = draw.choice(graph.input).type.tensor_type
        if tensor.shape.dim:
            dim = draw.choice(tensor.shape.dim)
            if draw.random() < 0.3:
                dim.dim_param = draw.choice(TEXTS)
            else:
                dim.dim_value = draw.choice(SIZES)
    elif how == 3 and graph.input:
        graph.input[0].type.tensor_type.elem_type = draw.randrange(24)
    elif graph.input:
        graph.input.append(draw.choice(graph.input))
        graph.input[-1].name = draw.choice(("more", graph.input[0].name, *TEXTS))


def judge_onnx(data: bytes, folder: Path) -> str:
    """Import a model and write the files of `mbc import`.

    If the model leaves the number of rows open, a number is given.
    """
    from mbc.interchange.importing import import_model
    from mbc.interchange.state_dict import write_weights

    path = folder / "model.onnx"
    path.write_bytes(data)
    try:
        created = import_model(path, "net", batch=2)
    except MbcError as error:
        if error.code != "MBC353":
            raise
        created = import_model(path, "net")
    check_text(created.source)
    write_weights(folder / "net.safetensors", created.network)
    return "taken"
