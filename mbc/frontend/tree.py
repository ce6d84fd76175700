"""Lark's tree -> the syntax tree of `mbc.frontend.ast`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from lark import Token, Tree

from mbc.errors import MbcError
from mbc.frontend import ast
from mbc.frontend.near import nearest
from mbc.frontend.positions import Places
from mbc.source import Span
from mbc.units import UNIT_BYTES

Branch = Tree[Token]
Child = Branch | Token

LONGEST_NUMBER = 30  # digits; longer numbers are meaningless and slow to read
LONGEST_NAME = 64  # characters of a network's name, which is that of a folder and a Python module


class TreeReader:
    """Reader of one tree; `places` turns offsets into spans."""

    def __init__(self, places: Places) -> None:
        """Take the places of the source."""
        self._places = places
        self._expressions: dict[str, Callable[[Branch], ast.Expression]] = {
            "name": lambda t: ast.Name(self._span(t), str(t.children[0])),
            "number": self._number,
            "size": self._size,
            "string": lambda t: ast.String(self._span(t), str(t.children[0])[1:-1]),
            "bad_number": self._bad_number,
            "true": lambda t: ast.Number(self._span(t), True),
            "false": lambda t: ast.Number(self._span(t), False),
            "tuple": lambda t: ast.Tuple(self._span(t), tuple(self.expression(c) for c in _present(t))),
            "call": self._call,
            "labelled": self._labelled,
            "attribute": lambda t: ast.Attribute(
                self._span(t.children[1]), self.expression(t.children[0]), str(t.children[1])
            ),
            "index": lambda t: ast.Index(self._span(t), self.expression(t.children[0]), self.expression(t.children[1])),
            "not": lambda t: ast.Unary(self._span(t), "not", self.expression(t.children[0])),
            "signed": lambda t: ast.Unary(self._span(t), str(t.children[0]), self.expression(t.children[1])),
            "pipe": self._pipe,
            "pick": lambda t: ast.Pick(self._span(t), *(self.expression(t.children[i]) for i in (0, 2, 3))),
            "either": lambda t: self._words(t, "or"),
            "both": lambda t: self._words(t, "and"),
        }
        for chain in ("comparison", "sum", "product", "power"):
            self._expressions[chain] = self._chain
        self._statements: dict[str, Callable[[Branch], ast.Statement]] = {
            "input": self._input,
            "output": lambda t: ast.Output(self._span(t), tuple(self.expression(c) for c in t.children)),
            "loss": lambda t: ast.Loss(self._span(t), self.expression(t.children[0])),
            "metric": lambda t: ast.Metric(self._span(t), self._word(t.children[0]), self.expression(t.children[1])),
            "return": lambda t: ast.Return(self._span(t), self.expression(t.children[0])),
            "for": self._for,
            "when": self._when,
            "assign": self._assign,
        }

    # ---- declarations ----

    def program(self, tree: Branch) -> ast.Program:
        """Return the tree of a whole source."""
        networks: list[ast.Network] = []
        blocks: list[ast.Block] = []
        sections: list[ast.Section] = []
        for child in cast(list[Branch], tree.children):
            parts = child.children
            if child.data == "section":
                entries = tuple(self._entry(cast(Branch, c)) for c in parts[1:])
                sections.append(ast.Section(self._span(parts[0]), str(parts[0]), entries))
                continue
            span, name, parameters = self._span(parts[0]), str(parts[0]), self._parameters(parts[1])
            if child.data == "network":
                self._check_length(name, span)
                networks.append(ast.Network(span, name, parameters, self._body(parts[2])))
            else:
                tensors = tuple(self._word(c) for c in _present(cast(Branch, parts[2])))
                blocks.append(ast.Block(span, name, parameters, tensors, self._body(parts[3])))
        return ast.Program(self._places.span(0, 1), tuple(networks), tuple(blocks), tuple(sections))

    def setting(self, tree: Branch) -> ast.Expression:
        """Return the tree of a setting's expression."""
        return self.expression(tree.children[0])

    def _parameters(self, tree: Child | None) -> tuple[ast.Parameter, ...]:
        if tree is None:
            return ()
        parameters: list[ast.Parameter] = []
        for child in _present(cast(Branch, tree)):
            name, default = cast(Branch, child).children
            value = None if cast(Child | None, default) is None else self.expression(default)
            parameters.append(ast.Parameter(self._span(name), str(name), value))
        return tuple(parameters)

    def _entry(self, tree: Branch) -> ast.Entry:
        name, value = tree.children
        return ast.Entry(self._span(name), str(name), self.expression(value))

    # ---- statements ----

    def _body(self, tree: Child) -> tuple[ast.Statement, ...]:
        return tuple(self._statement(cast(Branch, c)) for c in cast(Branch, tree).children)

    def _statement(self, tree: Branch) -> ast.Statement:
        return self._statements[tree.data](tree)

    def _input(self, tree: Branch) -> ast.Input:
        name, *shape, kind = _present(tree)
        sizes = tuple(self.expression(c) for c in shape)
        return ast.Input(self._span(tree), self._word(name), sizes, self._word(kind))

    def _for(self, tree: Branch) -> ast.For:
        *names, values, body = tree.children
        expression, label = self.expression(values), None
        if isinstance(expression, ast.Labelled):
            expression, label = expression.target, ast.Word(expression.span, expression.label)
        return ast.For(self._span(tree), tuple(self._word(n) for n in names), expression, label, self._body(body))

    def _when(self, tree: Branch) -> ast.When:
        _, condition, then, otherwise = cast(list[Branch | None], tree.children)
        assert condition is not None and then is not None
        other: tuple[ast.Statement, ...] = ()
        if otherwise is not None:
            other = (self._when(otherwise),) if otherwise.data == "when" else self._body(otherwise)
        return ast.When(self._span(tree), self.expression(condition), self._body(then), other)

    def _assign(self, tree: Branch) -> ast.Assign:
        *names, value = tree.children
        return ast.Assign(self._span(tree), tuple(self._word(n) for n in names), self.expression(value))

    # ---- expressions ----

    def expression(self, tree: Child) -> ast.Expression:
        """Return the tree of an expression."""
        branch = cast(Branch, tree)
        return self._expressions[branch.data](branch)

    def _number(self, tree: Branch) -> ast.Number:
        text = str(tree.children[0])
        if len(text) > LONGEST_NUMBER:
            raise MbcError(
                "MBC004",
                f"this number has {len(text)} characters; at most {LONGEST_NUMBER} are read",
                "write it shorter",
                self._span(tree),
            )
        if text.isdigit():
            return ast.Number(self._span(tree), int(text))
        value = float(text)
        if not math.isfinite(value):
            raise MbcError("MBC004", f"`{text}` is too large for a number", "use a smaller number", self._span(tree))
        return ast.Number(self._span(tree), value)

    def _size(self, tree: Branch) -> ast.Size:
        text = str(tree.children[0])
        unit = text.lstrip("0123456789. \t")
        digits = text[: -len(unit)].strip()
        if len(digits) > LONGEST_NUMBER:
            raise MbcError("MBC004", f"`{text}` is too long for a size", "write it shorter", self._span(tree))
        return ast.Size(self._span(tree), round(float(digits) * UNIT_BYTES[unit]))

    def _bad_number(self, tree: Branch) -> ast.Expression:
        text = str(tree.children[0])
        unit = text.lstrip("0123456789._")
        raise wrong_unit(text, unit, self._span(tree))

    def _call(self, tree: Branch) -> ast.Call:
        name, *rest = _present(tree)
        arguments: list[ast.Argument] = []
        for child in cast(list[Branch], rest):
            if child.data == "named":
                word, value = child.children
                arguments.append(ast.Argument(self._span(child), str(word), self.expression(value)))
            else:
                arguments.append(ast.Argument(self._span(child), None, self.expression(child.children[0])))
        return ast.Call(self._span(name), str(name), tuple(arguments))

    def _labelled(self, tree: Branch) -> ast.Labelled:
        target, label = tree.children
        assert isinstance(label, Token)
        end = label.end_pos or 0
        name = Token("LABEL", label[1:].lstrip(), start_pos=end - len(label[1:].lstrip()), end_pos=end)
        return ast.Labelled(self._span(name), self.expression(target), str(name))

    def _pipe(self, tree: Branch) -> ast.Pipe:
        first, *stages = tree.children
        return ast.Pipe(self._span(tree), self.expression(first), tuple(self.expression(s) for s in stages))

    def _chain(self, tree: Branch) -> ast.Chain:
        first, *rest = tree.children
        pairs = tuple(
            (str(operator), self.expression(operand), self._span(operator))
            for operator, operand in zip(rest[::2], rest[1::2], strict=True)
        )
        return ast.Chain(self._span(tree), self.expression(first), pairs)

    def _words(self, tree: Branch, operator: str) -> ast.Chain:
        first, *rest = tree.children
        pairs = tuple((operator, self.expression(operand), self._span(operand)) for operand in rest)
        return ast.Chain(self._span(tree), self.expression(first), pairs)

    # ---- places ----

    def _word(self, token: Child) -> ast.Word:
        return ast.Word(self._span(token), str(token))

    def _check_length(self, name: str, span: Span) -> None:
        if len(name) > LONGEST_NAME:
            message = f"the name of this network has {len(name)} characters; at most {LONGEST_NAME} are allowed"
            raise MbcError("MBC004", message, "shorten it: a folder and a Python module get this name", span)

    def _span(self, item: Child) -> Span:
        if isinstance(item, Token):
            return self._places.span(item.start_pos or 0, item.end_pos or 0)
        return self._places.span(item.meta.start_pos, item.meta.end_pos)


def wrong_unit(text: str, unit: str, span: Span) -> MbcError:
    """Return the error of a number that is followed by letters."""
    if not unit:
        return MbcError("MBC004", f"`{text}` is not a number", "write digits, such as 3 or 0.25 or 1e-4", span)
    meant = next((u for u in UNIT_BYTES if u.lower() == unit.lower()), None) or nearest(unit, UNIT_BYTES)
    if meant is None:
        meant = f"{unit[0].upper()}B" if unit[0].upper() in "MGT" else None
    hint = f"did you mean `{meant}`? " if meant else ""
    return MbcError(
        "MBC004",
        f"`{unit}` is not a unit",
        f"{hint}the units of sizes are {', '.join(UNIT_BYTES)} (GB is 10^9 bytes, GiB is 2^30)",
        span,
    )


def _present(tree: Branch) -> list[Child]:
    """Return the children that were written; Lark has None in place of missing optional ones."""
    return [c for c in cast(list[Child | None], tree.children) if c is not None]
