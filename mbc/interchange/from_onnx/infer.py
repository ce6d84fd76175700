"""Shapes of the values of an ONNX graph, and the values that are constant, node by node.

Constant values are sizes, and values that a few operators compute from sizes and weights.
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Any

import numpy as np

from mbc.interchange.from_onnx.package import onnx
from mbc.interchange.from_onnx.tensors import LARGEST_SIZE
from mbc.interchange.program import Array, Dynamic, TensorMeta
from mbc.interchange.refusal import printable

# Operators that are computed during the import if all of their operands are constant.
_FOLDED = frozenset((
    "Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Concat", "ConstantOfShape", "Cos", "CumSum", "Div",
    "Equal", "Exp", "Expand", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Greater",
    "GreaterOrEqual", "Identity", "IsInf", "IsNaN", "Less", "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul",
    "Neg", "Not", "Or", "Pad", "Pow", "Range", "Reciprocal", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum",
    "Reshape", "Round", "ScatterND", "Sign", "Sin", "Size", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Tile",
    "Transpose", "Trilu", "Unsqueeze", "Where", "Xor",
))  # fmt: skip
_GATHERED = frozenset(("Gather", "GatherND"))
# Operators whose shape onnx does not infer: the result has the shape of the first operand.
_ALIKE = frozenset(("GroupNormalization", "LRN"))
_LARGEST = 1 << 20  # most elements of a result that is larger than its operands
_LARGEST_TOTAL = 1 << 24  # most elements of all results, beside _TIMES_WEIGHTS times the elements of the file
_TIMES_WEIGHTS = 4
_LARGEST_GIVEN = 4096  # most elements of an operand that shapes may depend on
_BFLOAT16 = 16


class Values:
    """The shape, type and constant numbers of each value, by its name in the file."""

    def __init__(self, opsets: dict[str, int], weights: Set[str]) -> None:
        """Create the table of values.

        Args:
            opsets: The version of each operator set, by its domain.
            weights: The values that are weights of the file; the caller may add to the set.
        """
        self._weights = weights
        self._left = _LARGEST_TOTAL
        self._opsets = [onnx().helper.make_opsetid(domain, version) for domain, version in opsets.items()]
        self._version = opsets[""]
        self._wrong = (
            onnx().defs.SchemaError,
            onnx("onnx.shape_inference").InferenceError,
            onnx("onnx.checker").ValidationError,
        )
        self._types: dict[str, Any] = {}
        self.arrays: dict[str, Array] = {}

    def enter(self, name: str, proto: Any) -> None:
        """Enter a value with the type `proto`, a TypeProto.

        Sizes that no tensor can have are removed: onnx computes with them without a check, which may end the process.
        """
        if proto.HasField("tensor_type") and proto.tensor_type.HasField("shape"):
            for dim in proto.tensor_type.shape.dim:
                if dim.HasField("dim_value") and not 0 <= dim.dim_value < LARGEST_SIZE:
                    dim.ClearField("dim_value")
        self._types[name] = proto

    def enter_array(self, name: str, array: Array, kind: int) -> None:
        """Enter a constant value of the TensorProto type `kind`."""
        self._types[name] = onnx().helper.make_tensor_type_proto(kind, array.shape)
        self.arrays[name] = array
        if name in self._weights:
            self._left += _TIMES_WEIGHTS * array.size

    def kind(self, name: str) -> int:
        """Return the TensorProto type of a value; 0 if the type is not known."""
        proto = self._types.get(name)
        return int(proto.tensor_type.elem_type) if proto is not None and proto.HasField("tensor_type") else 0

    def shape(self, name: str) -> tuple[int | Dynamic, ...] | None:
        """Return the shape of a value; None if the shape is not known."""
        proto = self._types.get(name)
        if proto is None or not proto.HasField("tensor_type") or not proto.tensor_type.HasField("shape"):
            return None
        return tuple(_size(dim) for dim in proto.tensor_type.shape.dim)

    def take(self, node: Any) -> bool:
        """Enter the results of a node.

        Returns:
            True if the results are constant.
        """
        inputs = [name for name in node.input if name]
        if node.op_type == "Shape" and inputs:
            shape = self.shape(inputs[0])
            if shape is not None and TensorMeta(shape, "").static:
                given = {a.name: int(a.i) for a in node.attribute}
                sizes = shape[given.get("start", 0) : given.get("end", len(shape))]
                self.enter_array(node.output[0], np.array(sizes, np.int64), onnx().TensorProto.INT64)
                return True
        if node.op_type == "CastLike" and len(inputs) == 2 and self.kind(inputs[1]):
            # Only the type of the second input matters.
            node = onnx().helper.make_node("Cast", inputs[:1], list(node.output), to=self.kind(inputs[1]))
            inputs = inputs[:1]
        is_constant = all(name in self.arrays for name in inputs)
        if is_constant and any(self.kind(name) == _BFLOAT16 for name in inputs):
            is_constant = False
        for name, proto in self._inferred(node, inputs).items():
            self.enter(name, proto)
        if node.op_type in _ALIKE and self.shape(node.output[0]) is None and inputs and inputs[0] in self._types:
            self._types[node.output[0]] = self._types[inputs[0]]
        if is_constant and inputs and inputs[0] in self._weights and self._stays(node, inputs):
            return False
        return is_constant and node.op_type in _FOLDED and self._folded(node, inputs)

    def _stays(self, node: Any, inputs: list[str]) -> bool:
        """Return True if a result is still a parameter: rows of a parameter, or one repeated for each sample."""
        array = self.arrays[inputs[0]]
        if array.dtype.kind != "f":
            return False
        if node.op_type in _GATHERED:
            return self.arrays[inputs[1]].size > 1
        return node.op_type == "Expand" and array.shape[1:] == (self.shape(node.output[0]) or ())[1:] != ()

    def _inferred(self, node: Any, inputs: list[str]) -> dict[str, Any]:
        if any(name not in self._types for name in inputs):
            return {}
        package = onnx()
        try:
            schema = package.defs.get_schema(node.op_type, self._version, node.domain)
            data = {
                name: package.numpy_helper.from_array(self.arrays[name], name)
                for name in inputs
                if name in self.arrays and self.arrays[name].size <= _LARGEST_GIVEN and self.kind(name) != _BFLOAT16
            }
            types = {name: self._types[name] for name in inputs}
            infer = onnx("onnx.shape_inference").infer_node_outputs
            return dict(infer(schema, node, types, data, None, self._opsets))
        except (*self._wrong, RuntimeError, ValueError, TypeError):
            return {}  # the translation reports values without a shape

    def _folded(self, node: Any, inputs: list[str]) -> bool:
        shapes = [self.shape(name) for name in node.output]
        largest = max([_LARGEST, *(self.arrays[name].size for name in inputs)])
        for shape in shapes:
            sizes = () if shape is None else TensorMeta(shape, "").sizes
            if shape is None or len(sizes) != len(shape) or math.prod(sizes) > min(largest, self._left):
                return False
            self._left -= math.prod(sizes)
        package = onnx()
        helper = package.helper
        outputs = [helper.make_value_info(name, self._types[name]) for name in node.output]
        given = [helper.make_value_info(name, self._types[name]) for name in dict.fromkeys(inputs)]
        model = helper.make_model(helper.make_graph([node], "one", given, outputs), opset_imports=self._opsets)
        try:
            results = onnx("onnx.reference").ReferenceEvaluator(model).run(None, {n: self.arrays[n] for n in inputs})
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return False
        if not all(isinstance(array, np.ndarray | np.generic) for array in results):
            return False
        for name, array in zip(node.output, results, strict=True):
            self.enter_array(name, np.asarray(array), self.kind(name))
        return True


def _size(dim: Any) -> int | Dynamic:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return Dynamic(printable(str(dim.dim_param), 40) or "?")
