"""Writes the evaluation graph of a source, with the weights of a checkpoint, as an ONNX file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mbc.errors import MbcError
from mbc.files import read_text
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.interchange.from_onnx.package import onnx
from mbc.interchange.to_onnx import attention, declared, layers, shapes
from mbc.interchange.to_onnx.nodes import Nodes, NotExported, Operator, Rule
from mbc.ir.graph import Role, TrainingGraph
from mbc.ir.types import Precision
from mbc.ops.base import Array
from mbc.passes.training_step import differentiate
from mbc.runtime.replace import replace_file
from mbc.runtime.weights import read_weights
from mbc.source import Source
from mbc.version import __version__

OPSET = 21  # the first opset whose group norms scale channels; runtimes support it since 2024
IR_VERSION = 10
LARGEST_FILE = (2 << 30) - 1  # protobuf's limit for a message
_LARGEST_SOURCE = 16 << 20
_BATCH = "batch"

_FAMILIES = (declared, layers, attention, shapes)
RULES: Mapping[str, Rule] = MappingProxyType({name: rule for f in _FAMILIES for name, rule in f.RULES.items()})


def export_onnx(checkpoint: Path, source: Path, output: Path, settings: tuple[tuple[str, str], ...] = ()) -> int:
    """Write a network in evaluation mode as an ONNX file; the number of samples stays open.

    Args:
        checkpoint: The weights.
        source: The source of the network.
        output: The file to write.
        settings: Names and values of `--set`.

    Returns:
        The number of nodes.

    Raises:
        MbcError: The errors of reading a source; MBC163 and MBC164 (a checkpoint that does not fit), MBC349 (no package
            onnx), MBC354 (all operations that cannot be written), MBC355 (a source that cannot be read), MBC356 (a file
            that cannot be written).
    """
    onnx()
    try:
        text = read_text(source, _LARGEST_SOURCE)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise MbcError("MBC355", f"cannot read '{source}': {reason}", "give the source of the network") from error
    lowered = lower(parse(Source(str(source), text)), settings)
    graph = differentiate(lowered.network, lowered.optimizer, Precision.FP32)
    kept = (Role.PARAMETER, Role.STATISTIC)
    names = [state.value for state in graph.states if graph.values[state.value].role in kept]
    wanted = {name: graph.values[name].type.shape for name in names}
    arrays, _ = read_weights(checkpoint, wanted, True, names)
    model = build_model(graph, arrays)
    data = bytes(model.SerializeToString())
    try:
        replace_file(output, (data,))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise MbcError("MBC356", f"cannot write '{output}': {reason}", "choose another place") from error
    return len(model.graph.node)


def build_model(graph: TrainingGraph, arrays: Mapping[str, Array]) -> Any:
    """Return the ModelProto of a graph's evaluation.

    Args:
        graph: The graph.
        arrays: The numbers of each state, by name.

    Raises:
        MbcError: MBC354 for operations that ONNX does not have, MBC356 for more than 2 GiB of weights.
        NotExported: Never; it is caught and listed in MBC354.
    """
    nodes = Nodes(graph)
    wrong: list[str] = []
    for op in graph.infer:
        rule = RULES.get(op.kind)
        try:
            if rule is None:
                raise NotExported("this export has no ONNX operator for it", "leave it out of the network")
            rule(Operator(op, nodes))
        except NotExported as error:
            wrong.append(f"{op.name.removeprefix('infer.')}: {op.kind}: {error.reason}\n    instead: {error.remedy}")
    if wrong:
        listed = "\n  ".join(wrong)
        count = f"{len(wrong)} operation{'s' if len(wrong) > 1 else ''}"
        raise MbcError(
            "MBC354",
            f"'{graph.name}' has {count} that cannot be exported to ONNX:\n  {listed}",
            "change the network as stated above, or export only its weights (-o FILE.safetensors)",
        )
    package = onnx()
    helper, numbers = package.helper, package.numpy_helper
    read = {name for node in nodes.nodes for name in node.input}
    held = {
        name: np.asarray(array, np.float32).reshape(nodes.shapes.get(name, array.shape))
        for name, array in arrays.items()
        if name in read
    }
    held |= nodes.constants
    size = sum(array.nbytes for array in held.values())
    if size > LARGEST_FILE - (1 << 20):
        raise MbcError(
            "MBC356",
            f"an ONNX file has at most 2 GiB, and the weights of '{graph.name}' take {size} bytes",
            "export only its weights (-o FILE.safetensors)",
        )
    onnx_graph = helper.make_graph(
        nodes.nodes,
        graph.name,
        [_described(graph, name) for name in graph.infer_inputs],
        [_described(graph, name) for name in graph.infer_outputs],
        [numbers.from_array(array, name) for name, array in held.items()],
    )
    opset = helper.make_opsetid("", OPSET)
    return helper.make_model(
        onnx_graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="mbc", producer_version=__version__
    )


def _described(graph: TrainingGraph, name: str) -> Any:
    package = onnx()
    value = graph.values[name]
    shape: list[int | str] = list(value.type.shape)
    if value.per_sample:
        shape[0] = _BATCH
    return package.helper.make_tensor_value_info(name, package.TensorProto.FLOAT, shape)
