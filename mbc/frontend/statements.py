"""Statements: a network's body is run once, and its operations become the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mbc.errors import MbcError
from mbc.frontend import ast
from mbc.frontend.building import Building
from mbc.frontend.evaluate import Evaluator
from mbc.frontend.frame import Frame
from mbc.frontend.functions import FUNCTIONS
from mbc.frontend.names import Scope
from mbc.frontend.near import suggest
from mbc.frontend.operators import merge
from mbc.frontend.scalars import check_metric_name, losses_of, metric_of
from mbc.frontend.values import Losses, Result, Tensor, Written, describe
from mbc.ir.types import DType
from mbc.source import Span

DEEPEST_BLOCKS = 24
MOST_STATEMENTS = 300_000
INPUT_TYPES = {"float": DType.FP32, "class": DType.INT32, "uint8": DType.UINT8}


@dataclass(frozen=True, slots=True)
class _Returned:
    result: Result


class Expansion:
    """One expansion of one network: runs statements, applies layers and blocks, collects inputs, outputs and losses."""

    def __init__(self, blocks: Mapping[str, ast.Block], words: frozenset[str]) -> None:
        """Take the blocks of the source, and the words that settings accept."""
        self.building = Building()
        self.evaluator = Evaluator(self.building, blocks, words, self._apply, self._bound_elsewhere)
        self.inputs: list[tuple[Tensor, Span]] = []
        self.outputs: list[tuple[Tensor, Span]] = []
        self.losses: list[Losses] = []
        self.metrics: dict[str, Losses] = {}
        self._blocks = blocks
        self._bodies: list[Sequence[ast.Statement]] = []  # bodies of the network and of the blocks around this point
        self._depth = 0
        self._statements = 0

    def run_network(self, network: ast.Network, frame: Frame) -> None:
        """Run the whole body of a network."""
        self._bodies.append(network.body)
        returned = self._run(network.body, frame)
        assert returned is None

    # ---- statements ----

    def _run(self, body: Sequence[ast.Statement], frame: Frame) -> _Returned | None:
        for statement in body:
            self._tick(statement.span)
            returned = self._statement(statement, frame)
            if returned is not None:
                return returned
        return None

    def _tick(self, span: Span) -> None:
        self._statements += 1
        if self._statements > MOST_STATEMENTS:
            message = f"the network takes more than {MOST_STATEMENTS} statements to expand"
            raise MbcError("MBC017", message, "make its loops shorter, or end the blocks that contain each other", span)

    def _statement(self, statement: ast.Statement, frame: Frame) -> _Returned | None:
        match statement:
            case ast.Assign():
                self._assign(statement, frame)
            case ast.For():
                return self._for(statement, frame)
            case ast.When():
                taken = self.evaluator.condition(statement.condition, frame)
                return self._run(statement.then if taken else statement.otherwise, frame)
            case ast.Return():
                if self._depth == 0:
                    message = "`return` stands outside of a block"
                    raise MbcError("MBC037", message, "a network declares its results by `output`", statement.span)
                return _Returned(self.evaluator.evaluate(statement.value, frame))
            case _:
                if self._depth > 0:
                    word = {ast.Input: "input", ast.Output: "output", ast.Loss: "loss", ast.Metric: "metric"}[
                        type(statement)
                    ]
                    remedy = "write it in the network; a block takes tensors after `on` and returns them by `return`"
                    raise MbcError("MBC037", f"`{word}` cannot stand in a block", remedy, statement.span)
                self._declare(statement, frame)
        return None

    def _declare(self, statement: ast.Input | ast.Output | ast.Loss | ast.Metric, frame: Frame) -> None:
        if isinstance(statement, ast.Input):
            self._input(statement, frame)
            return
        if isinstance(statement, ast.Output):
            for expression in statement.values:
                self._output(self.evaluator.evaluate(expression, frame), expression.span)
            return
        if isinstance(statement, ast.Metric):
            check_metric_name(statement.name, self.metrics)
            result = self.evaluator.evaluate(statement.value, frame)
            self.metrics[statement.name.text] = metric_of(result, statement.value.span)
            return
        result = self.evaluator.loss(statement.value, frame)
        self.losses.append(losses_of(result, self.building, statement.value.span))

    def _input(self, statement: ast.Input, frame: Frame) -> None:
        name, kind = statement.name, statement.kind
        if kind.text not in INPUT_TYPES:
            remedy = suggest(kind.text, INPUT_TYPES, "types of inputs")
            raise MbcError("MBC010", f"`{kind.text}` is not a type of an input", remedy, kind.span)
        shape = tuple(self.evaluator.whole(e, frame, "a dimension of an input") for e in statement.shape)
        self._check_name(name.text, name.span)
        if any(tensor.value == name.text for tensor, _ in self.inputs):
            raise MbcError("MBC012", f"there are two inputs `{name.text}`", "rename one of them", name.span)
        if not frame.outermost:
            message = f"input `{name.text}` is declared in a loop"
            raise MbcError("MBC037", message, "declare every input at the start of the network", statement.span)
        bound = frame.get(name.text)
        if bound is not None:
            message = f"`{name.text}` is already {describe(bound)}, and cannot be an input as well"
            raise MbcError("MBC012", message, "rename one of them", name.span)
        path = frame.scope.claim(name.text, name.span)
        if len(shape) == 0 or len(shape) > 8:
            message = f"input `{name.text}` has {len(shape)} dimensions"
            raise MbcError("MBC014", message, "give 1 to 8 dimensions, the batch first", statement.span)
        tensor = self.building.input(path, shape, INPUT_TYPES[kind.text], statement.span)
        for first, _ in self.inputs[:1]:
            if first.type.shape[0] != shape[0]:
                message = (
                    f"input `{name.text}` has {shape[0]} rows, but input `{first.path}` "
                    f"of line {first.span.line} has {first.type.shape[0]}"
                )
                raise MbcError("MBC032", message, "begin the shape of every input with the batch", statement.span)
        self.inputs.append((tensor, statement.span))
        frame.bind(name.text, tensor)

    def _output(self, result: Result, span: Span) -> None:
        if isinstance(result, tuple):
            for item in result:
                self._output(item, span)
            return
        if not isinstance(result, Tensor):
            message = f"an output must be a tensor, but this is {describe(result)}"
            raise MbcError("MBC027", message, "name a tensor that a layer computes", span)
        if any(result.value == tensor.value for tensor, _ in self.inputs):
            message = f"input `{result.path}` cannot be an output as it is"
            raise MbcError("MBC027", message, "name a tensor that a layer computes", span)
        if any(result.value == tensor.value for tensor, _ in self.outputs):
            message = f"this tensor is already an output (the result of `{result.path}`)"
            raise MbcError("MBC012", message, "name each output once", span)
        self.outputs.append((result, span))

    def _assign(self, statement: ast.Assign, frame: Frame) -> None:
        result = self.evaluator.evaluate(statement.value, frame)
        if len(statement.names) == 1:
            self._bind(statement.names[0], result, frame)
            return
        for word, item in zip(statement.names, self._parts(statement.names, result, statement.span), strict=True):
            self._bind(word, item, frame)

    def _bind(self, word: ast.Word, result: Result, frame: Frame, here: bool = False) -> None:
        self._check_name(word.text, word.span)
        if isinstance(result, Written) and result.bound is None and result.path is None:
            result.bound = word
        if here:
            frame.bind_here(word.text, result)
        else:
            frame.bind(word.text, result)

    def _parts(self, names: Sequence[ast.Word], result: Result, span: Span) -> tuple[Result, ...]:
        if not isinstance(result, tuple) or len(result) != len(names):
            wanted = ", ".join(word.text for word in names)
            message = f"`{wanted}` takes a tuple of {len(names)}, but this is {describe(result)}"
            raise MbcError("MBC031", message, "write as many names as there are values", span)
        return result

    def _check_name(self, name: str, span: Span) -> None:
        if name in FUNCTIONS or name in self._blocks:
            what = "a function" if name in FUNCTIONS else "a block"
            raise MbcError("MBC035", f"`{name}` is the name of {what}", "choose another name", span)

    def _for(self, statement: ast.For, frame: Frame) -> _Returned | None:
        result = self.evaluator.evaluate(statement.values, frame)
        if not isinstance(result, tuple):
            message = f"a loop goes over a tuple or a range, but this is {describe(result)}"
            remedy = "write `range(n)` or a tuple such as `(1, 2, 3)`; one item needs a comma: `(1,)`"
            raise MbcError("MBC031", message, remedy, statement.values.span)
        label = statement.label
        scope = frame.scope
        path = scope.count("loop", statement.span) if label is None else scope.claim(label.text, label.span)
        for turn, item in enumerate(result):
            self._tick(statement.span)
            inner = Frame(Scope(f"{path}.{turn}"), frame)
            single = len(statement.names) == 1
            items = (item,) if single else self._parts(statement.names, item, statement.values.span)
            for word, part in zip(statement.names, items, strict=True):
                self._bind(word, part, inner, here=True)
            returned = self._run(statement.body, inner)
            if returned is not None:
                return returned
        return None

    # ---- layers and blocks ----

    def _apply(self, written: Written, result: Result, span: Span) -> Result:
        """Pipe a tensor, or a tuple of tensors, into a layer or block, and return the result."""
        items = result if isinstance(result, tuple) else (result,)
        tensors = tuple(item for item in items if isinstance(item, Tensor))
        name = written.of.name
        block = isinstance(written.of, ast.Block)
        least, most = (len(written.of.tensors),) * 2 if isinstance(written.of, ast.Block) else written.of.inputs
        if len(tensors) != len(items) or (not tensors and least):
            wrong = next((item for item in items if not isinstance(item, Tensor)), result)
            message = f"tensors are piped into `{name}`, but this is {describe(wrong)}"
            raise MbcError("MBC027", message, "put a tensor, or tensors in parentheses, in front of `|>`", span)
        if len(tensors) < least or (most is not None and len(tensors) > most):
            wanted = f"{least}" if least == most else f"{least} or more" if most is None else f"{least} to {most}"
            plural = "s" if wanted != "1" else ""
            message = f"{'block ' if block else ''}`{name}` takes {wanted} tensor{plural}, but got {len(tensors)}"
            remedy = f"pipe in the right number, several of them as `(a, b) |> {name}`"
            if most == 0:
                remedy = f"write it where a tensor is, as in `x * {name}(64)`"
            raise MbcError("MBC028", message, remedy, span)
        if written.path is None:
            own = written.label or written.bound
            scope = written.scope
            if own is None:
                written.path = scope.count(name, written.span, yields=not block)
            else:
                written.path = scope.claim(own.text, own.span, self.building.has_states)
        if isinstance(written.of, ast.Block):
            return self._expand(written.of, written, written.path, tensors, span)
        results = self.building.apply(written.of, written.settings, tensors, written.path, span)
        return Losses(((results.value, 1.0),)) if written.of.scalar and isinstance(results, Tensor) else results

    def _expand(self, block: ast.Block, written: Written, path: str, tensors: tuple[Tensor, ...], span: Span) -> Result:
        if self._depth >= DEEPEST_BLOCKS:
            message = f"blocks are nested more than {DEEPEST_BLOCKS} deep: does `{block.name}` contain itself?"
            raise MbcError("MBC018", message, "end the recursion by a condition, or write a loop", span)
        frame = Frame(Scope(path))
        self._depth += 1
        self._bodies.append(block.body)
        try:
            for parameter in block.parameters:
                result = written.arguments.get(parameter.name)
                if result is None:
                    assert parameter.default is not None
                    result = self.evaluator.evaluate(parameter.default, frame)
                frame.bind_here(parameter.name, result)
            for word, tensor in zip(block.tensors, tensors, strict=True):
                frame.bind_here(word.text, tensor)
            returned = self._run(block.body, frame)
        except MbcError as error:
            # Two levels say where to look; more levels of a deep nest would hide the message.
            if error.message.count("\n  in block ") < 2:
                error.message += f"\n  in block `{block.name}`, used at {span.source.name}:{span.line}:{span.column}"
            raise
        finally:
            self._depth -= 1
            self._bodies.pop()
        if returned is None:
            message = f"block `{block.name}` ends without `return`"
            raise MbcError("MBC030", message, "end it with `return` and its result", block.span)
        return returned.result

    def _bound_elsewhere(self, name: str) -> Span | None:
        return _binding(self._bodies[-1], name) if self._bodies else None

    def total_losses(self) -> tuple[tuple[str, float], ...]:
        """Return all losses, each value once."""
        return merge(*self.losses).terms


def _binding(body: Sequence[ast.Statement], name: str) -> Span | None:
    """Return the place where a loop or branch of `body` binds the name."""
    for statement in body:
        inner: tuple[ast.Statement, ...] = ()
        words: tuple[ast.Word, ...] = ()
        if isinstance(statement, ast.For):
            inner, words = statement.body, statement.names
        elif isinstance(statement, ast.When):
            inner = (*statement.then, *statement.otherwise)
        words += tuple(word for s in inner if isinstance(s, ast.Assign) for word in s.names)
        place = next((word.span for word in words if word.text == name), None) or _binding(inner, name)
        if place is not None:
            return place
    return None
