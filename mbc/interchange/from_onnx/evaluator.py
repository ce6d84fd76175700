"""Operators that the package's reference evaluator does not compute as ONNX defines them (onnx 1.19 to 1.23)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mbc.interchange.from_onnx.package import onnx

Attributes = Mapping[str, Any]
Misread = Callable[[Attributes, int, int], bool]


def _max_pool(attributes: Attributes, rank: int, opset: int) -> bool:
    """Return True for pads that the evaluator misreads: with a stride of 1 it expects the pads of an axis in pairs."""
    ones = all(set(attributes.get(name, (1,))) == {1} for name in ("strides", "dilations"))
    return ones and (len(set(attributes.get("pads", (0,)))) > 1 or attributes.get("auto_pad", b"NOTSET") != b"NOTSET")


def _average_pool(attributes: Attributes, rank: int, opset: int) -> bool:
    """Return True if the evaluator counts the pixels that `ceil_mode` adds."""
    return bool(attributes.get("ceil_mode", 0) and attributes.get("count_include_pad", 0))


def _softmax(attributes: Attributes, rank: int, opset: int) -> bool:
    """Return True if a softmax before opset 13 is over several axes."""
    return opset < 13 and attributes.get("axis", 1) % rank != rank - 1


_MISREAD: Mapping[str, Misread] = {
    "LRN": lambda attributes, rank, opset: True,  # its window is in another place
    "LpNormalization": lambda attributes, rank, opset: (
        attributes.get("p", 2) == 1
    ),  # it sums numbers, not absolute values
    "GlobalMaxPool": lambda attributes, rank, opset: rank != 4,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
}


def first_misread(model: Any, ranks: Mapping[str, int]) -> str:
    """Return the first operator of a model that the evaluator computes differently from ONNX, or an empty text.

    Args:
        model: The `ModelProto`.
        ranks: The number of dimensions of each value, by its name in the file.
    """
    opset = max((int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    read = onnx().helper.get_attribute_value
    for node in model.graph.node:
        misread = _MISREAD.get(node.op_type)
        if misread is None or node.domain not in ("", "ai.onnx"):
            continue
        if misread({str(a.name): read(a) for a in node.attribute}, ranks.get(node.input[0], 1), opset):
            return str(node.op_type)
    return ""
