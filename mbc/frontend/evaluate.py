"""The values of expressions in a frame: numbers, tensors, layers. Pipes append operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from mbc.errors import MbcError
from mbc.frontend import ast
from mbc.frontend.building import Building
from mbc.frontend.frame import Frame
from mbc.frontend.functions import FUNCTIONS
from mbc.frontend.operators import ARITHMETIC, Arithmetic, calculate, compare
from mbc.frontend.settings import Given, check, check_names, match, whole
from mbc.frontend.unknown import loose_pipe, of_framework, unknown_loss, unknown_name, unknown_operation, unknown_value
from mbc.frontend.values import Bytes, Result, Tensor, Text, WordValue, Written, describe, is_number
from mbc.ops import LAYERS
from mbc.ops.base import Layer, Parameter
from mbc.source import Span

MOST_EXPRESSIONS = 1_000_000
INFINITY = "inf"  # a source may bind this name, as any other

Apply = Callable[[Written, Result, Span], Result]
Elsewhere = Callable[[str], Span | None]


class Evaluator:
    """Evaluator of expressions."""

    def __init__(
        self,
        building: Building,
        blocks: Mapping[str, ast.Block],
        words: frozenset[str],
        apply: Apply,
        elsewhere: Elsewhere,
    ) -> None:
        """Take the context of the expressions.

        Args:
            building: The network under construction.
            blocks: The blocks of the source by name.
            words: Words that settings accept.
            apply: Pipes tensors into a layer or block.
            elsewhere: Returns where a name is bound that is unknown in the frame.
        """
        self._arithmetic = Arithmetic(building)
        self._blocks = blocks
        self._words = words
        self._apply = apply
        self._elsewhere = elsewhere
        self._expressions = 0

    def evaluate(self, expression: ast.Expression, frame: Frame) -> Result:
        """Return the value of an expression.

        Raises:
            MbcError: The expression is wrong.
        """
        self._spend(1, expression.span)
        match expression:
            case ast.Name():
                return self._name(expression, frame)
            case ast.Number():
                return expression.value
            case ast.Size():
                return Bytes(expression.size_bytes)
            case ast.String():
                return Text(expression.text)
            case ast.Tuple():
                return tuple(self.evaluate(item, frame) for item in expression.items)
            case ast.Call():
                return self._call(expression, frame)
            case ast.Labelled():
                return self._labelled(expression, frame)
            case ast.Attribute():
                return self._attribute(expression, frame)
            case ast.Index():
                return self._index(expression, frame)
            case ast.Unary():
                return self._unary(expression, frame)
            case ast.Chain():
                return self._chain(expression, frame)
            case ast.Pipe():
                return self._pipe(expression, frame)
            case ast.Pick():
                taken = self.condition(expression.condition, frame)
                return self.evaluate(expression.then if taken else expression.otherwise, frame)

    def _spend(self, expressions: int, span: Span) -> None:
        self._expressions += expressions
        if self._expressions > MOST_EXPRESSIONS:
            message = f"the network takes more than {MOST_EXPRESSIONS} expressions to expand"
            raise MbcError("MBC017", message, "make its loops and ranges shorter", span)

    def condition(self, expression: ast.Expression, frame: Frame) -> bool:
        """Return the value of a condition.

        Raises:
            MbcError: MBC029 if the value is not true or false.
        """
        result = self.evaluate(expression, frame)
        if not isinstance(result, bool):
            message = f"a condition must be true or false, but is {describe(result)}"
            raise MbcError("MBC029", message, "compare it, as in `x > 0`", expression.span)
        return result

    def whole(self, expression: ast.Expression, frame: Frame, what: str) -> int:
        """Return the value of an expression that must be a whole number; `what` names the number in messages.

        Raises:
            MbcError: MBC029 if the value is not a whole number.
        """
        result = self.evaluate(expression, frame)
        number = whole(result)
        if number is None:
            message = f"{what} must be a whole number, but is {describe(result)}"
            raise MbcError("MBC029", message, "give a whole number", expression.span)
        return number

    def _tensor(self, expression: ast.Expression, frame: Frame) -> Result:
        """Return the value of an operand; a layer that takes no tensors, such as `parameter(64)`, is applied."""
        return self._made(self.evaluate(expression, frame))

    def _made(self, result: Result) -> Result:
        if isinstance(result, tuple):
            return tuple(map(self._made, result))
        if isinstance(result, Written) and isinstance(result.of, Layer) and result.of.inputs == (0, 0):
            return self._apply(result, (), result.span)
        return result

    # ---- names ----

    def _name(self, name: ast.Name, frame: Frame) -> Result:
        value = frame.get(name.text)
        if value is not None:
            return value
        if name.text in self._blocks or name.text in LAYERS:
            return self._written(ast.Call(name.span, name.text, ()), frame)
        if name.text in self._words:
            return WordValue(name.text)
        if name.text == INFINITY:
            return math.inf
        if name.text in FUNCTIONS:
            message = f"`{name.text}` is a function"
            raise MbcError("MBC005", message, f"call it: `{name.text}(…)`", name.span)
        place = self._elsewhere(name.text)
        if place is not None:
            message = (
                f"the name `{name.text}` is not known here: line {place.line} is not run, or binds it only in a loop"
            )
            remedy = "bind it before the loop, and in every branch of an `if`, or give other parameters (--set)"
            raise MbcError("MBC005", message, remedy, name.span)
        raise unknown_name(name.text, name.span, frame, self._words)

    def _is_known(self, name: str, frame: Frame) -> bool:
        """Return whether `_name` knows the name, or reports a better error for it than an unknown name."""
        declared = name in self._blocks or name in LAYERS or name in self._words or name in (*FUNCTIONS, INFINITY)
        return declared or frame.get(name) is not None or self._elsewhere(name) is not None

    def _call(self, call: ast.Call, frame: Frame) -> Result:
        function = FUNCTIONS.get(call.name)
        if function is None:
            return self._written(call, frame)
        results = tuple(self.evaluate(a.value, frame) for a in call.arguments)
        if any(a.name is not None for a in call.arguments):
            raise MbcError("MBC007", f"`{call.name}` has no settings with names", "leave the name out", call.span)
        result = function(results, call.span)
        if isinstance(result, tuple):
            self._spend(len(result) // 10, call.span)  # a number of a range costs about a tenth of an expression
        return result

    def _written(self, call: ast.Call, frame: Frame) -> Written:
        """Return a layer or block with its settings."""
        bound = frame.get(call.name)
        if bound is not None:
            message = f"`{call.name}` is {describe(bound)}, which takes no settings"
            raise MbcError("MBC006", message, "write it without parentheses", call.span)
        block = self._blocks.get(call.name)
        layer = LAYERS.get(call.name) if block is None else None  # a block of the source hides a layer of its name
        if block is None and layer is None:
            raise unknown_operation(call.name, call.span, self._blocks, functions=True)
        if layer is not None:
            check_names(layer.name, [p.name for p in layer.parameters], call.arguments)
            words = {p.name: _words_of(p) for p in layer.parameters}
            given = [Given(a.name, self._given(a, words, frame), a.span) for a in call.arguments]
            settings = check(layer.name, layer.parameters, given, call.span)
            return Written(layer, settings, {}, frame.scope, call.span)
        assert block is not None
        check_names(block.name, [p.name for p in block.parameters], call.arguments)
        given = [Given(a.name, self.evaluate(a.value, frame), a.span) for a in call.arguments]
        matched = match(block.name, [p.name for p in block.parameters], given)
        for parameter in block.parameters:
            if parameter.default is None and parameter.name not in matched:
                message = f"block `{block.name}` needs `{parameter.name}`"
                remedy = f"write `{block.name}({parameter.name}=…)`"
                raise MbcError("MBC008", message, remedy, call.span)
        arguments = {name: argument.result for name, argument in matched.items()}
        return Written(block, {}, arguments, frame.scope, call.span)

    def _given(self, argument: ast.Argument, words: Mapping[str, Sequence[str]], frame: Frame) -> Result:
        """Return the value of a layer's setting; an unknown name is compared with `words`, which the setting accepts.

        Raises:
            MbcError: The name is unknown.
        """
        value, taken = argument.value, words.get(argument.name or "", ())
        if isinstance(value, ast.Name) and value.text in taken and frame.get(value.text) is None:
            return WordValue(value.text)  # also a word that a layer has as its name: `mode=linear`
        if isinstance(value, ast.Name) and taken and not self._is_known(value.text, frame):
            raise unknown_value(value.text, value.span, argument.name or "", taken)
        return self.evaluate(value, frame)

    def _labelled(self, labelled: ast.Labelled, frame: Frame) -> Result:
        result = self.evaluate(labelled.target, frame)
        if not isinstance(result, Written):
            message = f"`@{labelled.label}` names a layer or block, but stands after {describe(result)}"
            raise MbcError("MBC027", message, "put the label after the layer", labelled.span)
        if result.label is not None or result.path is not None:
            name = result.label.text if result.label is not None else result.path
            message = f"this layer already has the name `{name}`"
            raise MbcError("MBC013", message, "give one label where the layer is written", labelled.span)
        result.label = ast.Word(labelled.span, labelled.label)
        return result

    # ---- operators ----

    def _attribute(self, attribute: ast.Attribute, frame: Frame) -> Result:
        foreign = of_framework(attribute, frame)
        if foreign is not None:
            raise foreign
        result = self._tensor(attribute.target, frame)
        if attribute.name != "shape":
            message = f"there is no `.{attribute.name}`"
            raise MbcError("MBC027", message, "a tensor has `.shape`, and nothing else", attribute.span)
        if not isinstance(result, Tensor):
            message = f"only a tensor has `.shape`; this is {describe(result)}"
            raise MbcError("MBC027", message, "use it on a tensor", attribute.span)
        return result.type.shape

    def _index(self, index: ast.Index, frame: Frame) -> Result:
        result = self.evaluate(index.target, frame)
        if not isinstance(result, tuple):
            hint = "take an element of its shape, as in `x.shape[1]`" if isinstance(result, Tensor) else "index a tuple"
            raise MbcError("MBC029", f"{describe(result)} cannot be indexed", hint, index.span)
        number = self.whole(index.index, frame, "an index")
        if not -len(result) <= number < len(result):
            message = f"index {number} is outside of {describe(result)}"
            raise MbcError("MBC029", message, f"use 0 to {len(result) - 1}, or -1 for the last", index.span)
        return result[number]

    def _unary(self, unary: ast.Unary, frame: Frame) -> Result:
        if unary.operator == "not":
            return not self.condition(unary.operand, frame)
        result = self._tensor(unary.operand, frame)
        if unary.operator == "-":
            return self._arithmetic.negate(result, unary.span, frame.scope)
        if is_number(result) or isinstance(result, Tensor):
            return result
        raise MbcError("MBC029", f"`+` does not take {describe(result)}", "leave it out", unary.span)

    def _chain(self, chain: ast.Chain, frame: Frame) -> Result:
        first_operator = chain.rest[0][0]
        if first_operator in ("and", "or"):
            stop = first_operator == "or"
            operands = (chain.first, *(operand for _, operand, _ in chain.rest))
            return stop if any(self.condition(o, frame) is stop for o in operands) else not stop
        total = self._tensor(chain.first, frame)
        for symbol, operand, span in chain.rest:
            other = self._tensor(operand, frame)
            if symbol in ("==", "!=", "<", "<=", ">", ">="):
                total = compare(symbol, total, other, span)
            elif symbol == "**" and is_number(total) and is_number(other):
                total = calculate(symbol, total, other, span)
            else:
                total = self._arithmetic.operate(symbol, total, other, span, frame.scope)
        return total

    def loss(self, expression: ast.Expression, frame: Frame) -> Result:
        """Return the value of a loss; an unknown name in its last stage is compared with losses."""
        if isinstance(expression, ast.Pipe):
            return self._pipe(expression, frame, loss=True)
        return self.evaluate(expression, frame)

    def _pipe(self, pipe: ast.Pipe, frame: Frame, loss: bool = False) -> Result:
        result = self._tensor(pipe.first, frame)
        for stage in pipe.stages:
            bare = stage.target if isinstance(stage, ast.Labelled) else stage
            span = bare.span
            self._check_stage(bare, frame, loss and stage is pipe.stages[-1])
            if isinstance(stage, ast.Chain) and stage.rest[0][0] in ARITHMETIC:
                first = self.evaluate(stage.first, frame)
                if isinstance(first, Written):
                    raise loose_pipe(pipe, stage, first)
            layer = self.evaluate(stage, frame)
            if not isinstance(layer, Written):
                message = f"tensors are piped into a layer or block, but this is {describe(layer)}"
                raise MbcError("MBC027", message, "put a layer after `|>`, such as `relu` or `conv(64, 3)`", span)
            result = self._apply(layer, result, span)
        return result

    def _check_stage(self, stage: ast.Expression, frame: Frame, loss: bool) -> None:
        """Raise MBC006 for a stage whose name is unknown."""
        if not isinstance(stage, ast.Name | ast.Call):
            return
        name = stage.text if isinstance(stage, ast.Name) else stage.name
        if not self._is_known(name, frame):
            raise unknown_loss(name, stage.span) if loss else unknown_operation(name, stage.span, self._blocks)


def _words_of(parameter: Parameter) -> Sequence[str]:
    """Return the words that a setting accepts; none for a setting that takes numbers."""
    return ("true", "false") if parameter.kind == "bool" else parameter.words
