"""Reads an ONNX file as a program of ATen operations, each node by its rule.

A node that a rule refuses becomes a node of the program with the reason, so that the translation lists all refusals.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from mbc.errors import MbcError
from mbc.files import read_file
from mbc.interchange.aten.operands import Refused
from mbc.interchange.from_onnx import (
    attention,
    conditions,
    elementwise,
    layers,
    normalization,
    reductions,
    resize,
    shapes,
    windows,
)
from mbc.interchange.from_onnx.operator import Operator, Rule
from mbc.interchange.from_onnx.package import onnx
from mbc.interchange.from_onnx.program_so_far import ProgramSoFar
from mbc.interchange.from_onnx.tensors import dtype_name, read_tensor
from mbc.interchange.program import Program, TensorMeta
from mbc.interchange.refusal import NOTHING_LIKE_IT, REPLACE, printable

LARGEST_FILE = 2 << 30  # protobuf's limit for a message; weights in other files may be larger
MOST_NODES = 100_000
OPSETS = range(11, 29)
_MOVED = frozenset(("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze"))
_LONE = frozenset(("Conv", "ConvTranspose"))
_NORMS = frozenset(("BatchNormalization", "LayerNormalization", "GroupNormalization", "InstanceNormalization"))

_FAMILIES = (layers, windows, normalization, attention, elementwise, conditions, reductions, shapes, resize)
RULES: Mapping[str, Rule] = MappingProxyType({name: rule for f in _FAMILIES for name, rule in f.RULES.items()})
NOT_TAKEN: Mapping[str, str] = MappingProxyType({name: text for f in _FAMILIES for name, text in f.NOT_TAKEN.items()})


def _may_hold_norm(operator: Operator) -> bool:
    """Return whether a convolution has a bias that a folded batch norm may have left.

    Exporters give folded numbers new names; the numbers of a layer that had a bias before are `PATH.weight` and
    `PATH.bias`.
    """
    if operator.op not in _LONE:
        return False
    names = operator.input(1), operator.input(2)
    own = [name.removesuffix(suffix) for name, suffix in zip(names, (".weight", ".bias"), strict=True)]
    is_own = own[0] == own[1] and all(map(str.__ne__, own, names))
    return bool(names[1]) and not is_own


def read_onnx(path: Path, batch: int | None = None) -> Program:
    """Return the program of an .onnx file, for training.

    A RuntimeWarning is given if batch norms seem to have been folded into convolutions.

    Args:
        path: The file.
        batch: Samples of a mini-batch, if the file leaves them open.

    Raises:
        MbcError: MBC349 (no package onnx), MBC350 (no such file, or not a whole one), MBC351 (weights that are missing
            or damaged), MBC352 (an opset that is not supported) or MBC353 (no batch, or a batch that the file states
            already).
    """
    package = onnx()
    try:
        data = read_file(path, LARGEST_FILE)
        model = package.ModelProto.FromString(data)
    except (OSError, ValueError, onnx("google.protobuf.message").DecodeError, RecursionError) as error:
        _report_broken(path, getattr(error, "strerror", None) or printable(str(error)), cause=error)
    if not model.graph.node:
        _report_broken(path, "it holds no graph")
    try:
        return _Reader(path, model, batch).program()
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        _report_broken(path, f"its graph is damaged ({type(error).__name__}: {printable(str(error))})", cause=error)
    except (ValueError, RuntimeError, RecursionError) as error:
        _report_broken(path, printable(str(error)), cause=error)


def _report_broken(path: Path, reason: str, cause: BaseException | None = None) -> NoReturn:
    remedy = "give a whole file that torch.onnx.export, or another exporter, wrote"
    raise MbcError("MBC350", f"cannot read '{path}': {reason}", remedy) from cause


def report_batch_given_twice(path: Path, batch: int) -> NoReturn:
    """Raise MBC353 for a `batch` beside a file that states one.

    Raises:
        MbcError: MBC353.
    """
    raise MbcError(
        "MBC353",
        f"--batch {batch} is given, but '{path}' states the size of a mini-batch itself",
        "leave --batch out, and compile with --set batch=N",
    )


class _Reader(ProgramSoFar):
    """Reads the values and nodes of a file, and runs the rule of each node."""

    def __init__(self, path: Path, model: Any, batch: int | None) -> None:
        self._path = path
        self._model = model
        self._batch = batch
        super().__init__(self._opsets())

    def program(self) -> Program:
        graph = self._model.graph
        if len(graph.node) > MOST_NODES:
            raise ValueError(f"it has {len(graph.node)} nodes; at most {MOST_NODES} are supported")
        self._enter_initializers()
        inputs = [value for value in graph.input if value.name not in self._given]
        self._enter_inputs(inputs)
        operators = self._operators()
        for operator in operators:
            self._convert(operator)
        self._refuse_unread(operators)
        for value in graph.output:
            if not self._has(value.name):
                raise ValueError(f"nothing gives its output '{printable(value.name)}'")
        said = {op.op for op in operators}
        if not said & _NORMS and any(map(_may_hold_norm, operators)):
            warnings.warn(
                f"'{self._path}' has convolutions with a bias, and no normalisation: batch norms that were folded into"
                " them cannot be rebuilt. A network trains differently without them: export it before they are folded"
                " (torch.onnx.export: training=TrainingMode.TRAINING, or optimize=False)",
                RuntimeWarning,
                stacklevel=2,
            )
        return Program(
            tuple(self.name(value.name).name for value in inputs),
            self._held,
            tuple(node for nodes in self._nodes for node in nodes),
            tuple(self.name(value.name).name for value in graph.output),
            self._tensors,
            (),
            self._arrays,
            printable(f"ONNX, {self._model.producer_name or '?'} {self._model.producer_version}".strip(), 60),
        )

    def _opsets(self) -> dict[str, int]:
        opsets = {str(entry.domain): int(entry.version) for entry in self._model.opset_import}
        opsets[""] = max(opsets.pop("ai.onnx", 0), opsets.get("", 0))
        newest = min(OPSETS[-1], int(onnx().defs.onnx_opset_version()))
        if not OPSETS[0] <= opsets[""] <= newest:
            raise self._form(f"its opset is {opsets['']}, but only opsets {OPSETS[0]} to {newest} are supported")
        if self._model.functions:
            raise self._form(f"it has functions of its own, such as '{printable(self._model.functions[0].name, 60)}'")
        return opsets

    def _form(self, reason: str) -> MbcError:
        remedy = "export it again with opset_version=20 and without functions, or convert it: onnx.version_converter,"
        return MbcError("MBC352", f"cannot read '{self._path}': {reason}", f"{remedy} onnx.inliner")

    def _enter_initializers(self) -> None:
        graph = self._model.graph
        if graph.sparse_initializer:
            raise MbcError(
                "MBC351", f"cannot read the weights of '{self._path}': they are sparse", "export them as dense tensors"
            )
        for tensor in graph.initializer:
            if not tensor.name or tensor.name in self._given:
                raise ValueError(f"it has several weights of the name '{printable(tensor.name)}'")
            self._given.add(tensor.name)
            self._values.enter_array(tensor.name, read_tensor(tensor, self._path), tensor.data_type)

    def _enter_inputs(self, inputs: Sequence[Any]) -> None:
        opened = False
        for value in inputs:
            if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
                raise ValueError(f"its input '{printable(value.name)}' is no tensor, or has no shape")
            proto = onnx().TypeProto.FromString(value.type.SerializeToString())
            dims = proto.tensor_type.shape.dim
            if any(dim.HasField("dim_value") and dim.dim_value == 0 for dim in dims[1:]):
                raise ValueError(f"its input '{printable(value.name)}' has no elements")
            if len(dims) and not (dims[0].HasField("dim_value") and dims[0].dim_value > 0):
                opened = True
                if self._batch is not None:
                    dims[0].dim_value = self._batch
            self._values.enter(value.name, proto)
            self._describe(value.name)
        if opened and self._batch is None:
            raise MbcError(
                "MBC353",
                f"'{self._path}' leaves the size of a mini-batch open",
                "state it: --batch 32 (--set batch=N changes it later)",
            )
        if not opened and self._batch is not None:
            report_batch_given_twice(self._path, self._batch)

    def _operators(self) -> list[Operator]:
        """Return the nodes that are not constant, each after the nodes that it reads from.

        Raises:
            ValueError: A node reads a value that no earlier node gives, or a value is given twice.
        """
        operators: list[Operator] = []
        given = set(self._given) | {value.name for value in self._model.graph.input}
        for number, node in enumerate(self._model.graph.node):
            operator = Operator(node, self, number)
            for name in operator.inputs:
                if name and name not in given:
                    raise ValueError(
                        f"node '{operator.name}' reads '{printable(name, 60)}', which nothing before it gives: a cycle,"
                        " or a part is missing"
                    )
            for name in operator.outputs:
                if name and name in given:
                    raise ValueError(f"'{printable(name, 60)}' is given twice, also by node '{operator.name}'")
                given.add(name)
            if node.op_type == "Constant" and not operator.domain:
                self._enter_constant(node)
                continue
            if operator.domain in ("", "ai.onnx") and self._values.take(node):
                if operator.op in _MOVED and node.input[0] in self._given:
                    self._given.add(
                        node.output[0]
                    )  # it stays a weight; an exporter may keep only one of several equal weights
                continue
            operators.append(operator)
            for name in filter(None, operator.outputs):
                self._makers[name] = operator
                self._describe(name)
            for name in filter(None, operator.inputs):
                self._users[name].append(operator)
        for value in self._model.graph.output:  # an output has a user outside, so that it is no inner value of a layer
            node = onnx().helper.make_node("Identity", [value.name], [])
            self._users[value.name].append(Operator(node, self, len(operators)))
        return operators

    def _enter_constant(self, node: Any) -> None:
        package = onnx()
        (attribute,) = node.attribute
        value = package.helper.get_attribute_value(attribute)
        if attribute.name == "value":
            array, kind = read_tensor(value, self._path), int(value.data_type)
        elif attribute.name in ("value_int", "value_ints"):
            array, kind = np.array(value, np.int64), int(package.TensorProto.INT64)
        elif attribute.name in ("value_float", "value_floats"):
            array, kind = np.array(value, np.float32), int(package.TensorProto.FLOAT)
        else:
            return  # text, or sparse numbers: the operator that needs them is refused
        self._values.enter_array(node.output[0], array, kind)

    def _describe(self, value: str) -> None:
        shape = self._values.shape(value)
        if shape is not None:
            self._tensors[self.name(value).name] = TensorMeta(shape, dtype_name(self._values.kind(value)))

    def _has(self, value: str) -> bool:
        return value in self._makers or value in self._values.arrays or self.shape(value) is not None

    def _convert(self, operator: Operator) -> None:
        self.begin(operator)
        try:
            rule = RULES.get(operator.op) if operator.domain in ("", "ai.onnx") else None
            if rule is None:
                raise Refused(NOTHING_LIKE_IT, NOT_TAKEN.get(operator.op, REPLACE))
            if any(0 in (self.shape(value) or ()) for value in operator.outputs):
                raise Refused("one of its results has no elements", "leave out operators that compute nothing")
            rule(operator)
        except Refused as error:
            self._nodes[-1] = [self._refusal(operator, error.reason, error.remedy)]
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            reason = f"its attributes are damaged ({type(error).__name__})"
            self._nodes[-1] = [self._refusal(operator, reason, "export the model again")]

    def _refuse_unread(self, operators: Sequence[Operator]) -> None:
        """Refuse each node with an attribute or input that no rule read.

        This runs after all rules, because the rule of a layer's last node reads the nodes before it.
        """
        for number, operator in enumerate(operators):
            refused = any(node.refusal for node in self._nodes[number])
            refusal = None if refused else operator.unread()
            if refusal is not None:
                self._nodes[number] = [self._refusal(operator, *refusal)]
