"""Translates a program to steps, each node by its rule; collects all refusals and leaves out unused steps."""

from __future__ import annotations

from collections.abc import Sequence

from mbc.interchange.aten import NOT_TAKEN, RULES
from mbc.interchange.aten.base import Call
from mbc.interchange.aten.constants import FOLDS, OF_PARAMETER_ELEMENTS, folded
from mbc.interchange.aten.operands import (
    UNKNOWN,
    Activation,
    Known,
    Noise,
    Operand,
    Refused,
    Result,
    Unknown,
    Untaken,
    Weight,
    shape_of,
)
from mbc.interchange.aten.operation_schemas import schema_of
from mbc.interchange.aten.parameters import RULES as PARAMETER_RULES
from mbc.interchange.aten.parameters import computed
from mbc.interchange.builder import NetworkBuilder
from mbc.interchange.functionalize import functionalize
from mbc.interchange.grad_regions import inline_regions
from mbc.interchange.program import FLOATING, Dynamic, Node, Program, operands_of
from mbc.interchange.refusal import NOTHING_LIKE_IT, REPLACE, Refusal, report_refusals
from mbc.interchange.steps import Imported

# Operations that check or name sizes; the network does not use their results.
_CHECKS = ("aten._assert", "aten.sym_", "aten.record_stream", "_operator.", "aten._check")
# Operations that appear only after `ExportedProgram.run_decompositions`.
_DECOMPOSED = frozenset(
    f"aten.{name}.default"
    for name in (
        "convolution", "addmm", "_native_batch_norm_legit_functional", "native_batch_norm", "native_layer_norm",
        "native_group_norm", "_softmax", "_log_softmax", "max_pool2d_with_indices",
    )
)  # fmt: skip
_OF_TRUTH = frozenset(
    ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and",
     "bitwise_or", "bitwise_not", "bitwise_xor", "__and__", "__or__", "__xor__", "clone", "cat", "stack", "repeat",
     "lift_fresh_copy")
)  # fmt: skip


def translate(program: Program, name: str) -> Imported:
    """Return the network of a program.

    Raises:
        MbcError: MBC303, which lists everything that cannot be translated.
    """
    decomposed = next((node.target for node in program.nodes if node.target in _DECOMPOSED), None)
    if decomposed is not None:
        reason = f"its layers are decomposed into operations such as {decomposed}"
        remedy = "export the model without run_decompositions()"
        report_refusals("the model", (Refusal("the model", "the program", reason, remedy),))
    translation = _Translation(functionalize(inline_regions(program)))
    outputs = translation.run()
    if translation.refusals:
        report_refusals("the model", translation.refusals)
    imported = translation.network.imported(name, outputs)
    if not imported.trained:
        report_refusals("the model", (_without_training(imported),))
    return imported


def _without_training(imported: Imported) -> Refusal:
    reason = "all parameters that it computes with are frozen" if imported.frozen else "it computes with no parameter"
    remedy = "set requires_grad=True for the parameters to train" if imported.frozen else "export a model to train"
    return Refusal("the model", "the program", reason, remedy)


class _Translation:
    """The translation of a program's nodes, and all refusals so far."""

    def __init__(self, program: Program) -> None:
        self.refusals: list[Refusal] = []
        self.network = NetworkBuilder(program)
        self._program = program
        self._operands = self.network.operands

    # ---- the program ----

    def run(self) -> tuple[int, ...]:
        """Return the values of the outputs, after translating all nodes; outputs that are refused are left out."""
        self._enter_inputs()
        for held in self._program.held.values():
            if held.kind == "parameter" and held.meta.dtype != "float32":
                self._refuse_whole(held.key, f"its parameters are {held.meta.dtype}", "call model.float() first")
        for node in self._program.nodes:
            self._take(node)
        outputs: list[int] = []
        for output in self._program.outputs:
            value = self._output(output)
            if value is not None and value in outputs:
                self._refuse_whole(output, "it returns this tensor twice", "return it once, and use it twice outside")
            elif value is not None:
                outputs.append(value)
        if not self._program.outputs:
            self._refuse_whole("", "it returns no tensor", "return the tensors that the loss needs")
        for name in self._program.mutated:
            self._refuse_whole(name, "it changes this tensor while it runs", "compute a new tensor in each call")
        return tuple(outputs)

    def _enter_inputs(self) -> None:
        for number, name in enumerate(self._program.inputs):
            meta = self._program.tensors[name]
            shape = tuple(size if isinstance(size, int) else 1 for size in meta.shape)
            dynamic = next((size for size in meta.shape if isinstance(size, Dynamic)), None)
            if dynamic is not None:
                reason = f"its size {list(meta.shape).index(dynamic)} is dynamic ({dynamic.name})"
                self._refuse_whole(name, reason, "export it without dynamic_shapes: --set batch=N sets the batch later")
            if meta.dtype != "float32":
                self._refuse_whole(name, f"this input is {meta.dtype}", "give float32 numbers to the model")
            if not shape:
                self._refuse_whole(
                    name, "this input has no dimensions", "give the model tensors with a dimension for samples"
                )
            if 0 in shape:
                remedy = "export it with an example that has samples"
                self._refuse_whole(name, f"this input has no elements, {list(shape)}", remedy)
            self.network.enter_input(number, shape)
            self._operands[name] = UNKNOWN if dynamic is not None else Activation(number, shape)

    def _take(self, node: Node) -> None:
        """Translate a node.

        An operation on the result of a refused one is skipped, unless the operation has no rule at all.
        """
        result: Result = UNKNOWN
        try:
            operands = [self._operands.get(name) for name in operands_of(node)]
            is_unknown = any(isinstance(x, Unknown) for x in operands)
            if not node.target.startswith(_CHECKS) and (not is_unknown or _has_no_rule(node)):
                result = self._apply(node)
        except Refused as error:
            self._refuse(node, error.reason, error.remedy)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            self._refuse(node, f"its arguments are damaged ({type(error).__name__})", "export the model again")
        results = result if isinstance(result, tuple) else (result,) * len(node.outputs)
        self._operands.update(zip(node.outputs, results, strict=False))

    def _apply(self, node: Node) -> Result:
        if node.refusal is not None:
            raise Refused(*node.refusal)
        target, operands = node.target, [self.network.operand(name) for name in operands_of(node)]
        rule = folded(target, operands) or computed(target, operands) or RULES.get(target)
        if any(isinstance(operand, Known) and operand.weight is not None for operand in operands):
            rule = OF_PARAMETER_ELEMENTS.get(target, rule)
        if rule is None:
            raise Refused(NOTHING_LIKE_IT, NOT_TAKEN.get(target, REPLACE))
        for output in node.outputs:
            meta = self._program.tensors.get(output)
            if meta is not None and not meta.static:
                raise Refused("its result has a dynamic size", "export it without dynamic_shapes")
            if meta is not None and meta.dtype in FLOATING and meta.dtype != "float32":
                raise Refused(
                    f"it computes in {meta.dtype}",
                    "export it in float32, and choose the type with train { precision = bf16 }",
                )
        call = Call(node, self.network)
        if rule is not None and computed(target, operands) is rule:
            self._check_whole(node, operands)
        result = rule(call)
        call.check_all_read()
        self._check_results(node, operands, result)
        return result

    def _check_whole(self, node: Node, operands: Sequence[Operand]) -> None:
        """Raise Refused if an operand is a repeated parameter, because the parameter would not be repeated here.

        Raises:
            Refused: A parameter is repeated.
        """
        for name, operand in zip(operands_of(node), operands, strict=True):
            if shape_of(operand) != self.network.meta(name).sizes:
                raise Refused(
                    "it computes with a parameter that is repeated", "combine it with a tensor of the network"
                )

    def _check_results(self, node: Node, operands: Sequence[Operand], result: Result) -> None:
        """Raise Refused if a result has another shape or type than the program states; this checks every rule.

        Raises:
            Refused: The shape or the type differs.
        """
        results = result if isinstance(result, tuple) else (result,) * len(node.outputs)
        for output, operand in zip(node.outputs, results, strict=False):
            meta, shape = self._program.tensors.get(output), shape_of(operand)
            if meta is None or shape is None:
                continue
            is_repeated = isinstance(operand, Weight) and node.target.startswith("aten.expand")
            if shape != meta.sizes and not is_repeated:
                reason = f"its result is {list(shape)} here, but {list(meta.sizes)} in the program"
                raise Refused(reason, "this is a mistake of mbc: please report it")
            if isinstance(operand, Activation) and meta.dtype not in FLOATING and not _keeps_type(node.target):
                raise Refused(f"it converts a computed tensor to {meta.dtype}", "compute in float32")

    def _output(self, name: str) -> int | None:
        operand = self._operands.get(name)
        if operand is None and name in self._program.held:
            self._refuse_whole(name, "it returns a parameter or buffer", "return the result of a layer")
            return None
        if isinstance(operand, Untaken):
            self._refuse_whole(name, operand.reason, operand.remedy)
            return None
        if operand is None or isinstance(operand, Weight | Noise | Known):
            self._refuse_whole(name, "it returns no tensor that the network computes", "return the result of a layer")
            return None
        if not isinstance(operand, Activation):
            if not self.refusals:  # an earlier refusal gives the reason
                self._refuse_whole(
                    name, "it depends on an operation that is not supported", "return the result of a layer"
                )
            return None
        try:
            settled = Call(Node("output", {}, (name,)), self.network).settle(operand)
        except Refused as error:
            self._refuse_whole(name, f"as an output, {error.reason}", error.remedy)
            return None
        if settled.value < len(self._program.inputs):
            self._refuse_whole(name, "it returns an input as it is", "return the result of a layer")
            return None
        return settled.value

    # ---- refusals ----

    def _refuse(self, node: Node, reason: str, remedy: str) -> None:
        module = node.modules[-1] if node.modules else None
        where = f"'{module.path}' ({module.name})" if module is not None else "the model itself"
        where = f"node '{node.name}'" if node.name else where
        self.refusals.append(Refusal(where, node.shown or node.target, reason, remedy, node.line))

    def _refuse_whole(self, name: str, reason: str, remedy: str) -> None:
        what = f"'{name}'" if name else "the model"
        self.refusals.append(Refusal(what, "the program", reason, remedy))


def _has_no_rule(node: Node) -> bool:
    """Return True for an operation that is refused with any operands."""
    if node.refusal is not None:
        return node.refusal[0] == NOTHING_LIKE_IT
    return not any(node.target in rules for rules in (RULES, FOLDS, OF_PARAMETER_ELEMENTS, PARAMETER_RULES))


def _keeps_type(target: str) -> bool:
    """Return whether an operation may give booleans or integers: a comparison, or one that only moves elements."""
    schema = schema_of(target)
    name = target.removeprefix("aten.").partition(".")[0]
    return name in _OF_TRUTH or (schema is not None and schema.viewed(0) is not None)
