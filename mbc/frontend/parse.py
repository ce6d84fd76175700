"""Source text -> syntax tree. The grammar is `grammar/mbc.lark`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedToken
from lark.lark import PostLex

from mbc.errors import MbcError
from mbc.frontend import ast
from mbc.frontend.positions import Places
from mbc.frontend.syntax import unexpected_character, unexpected_token
from mbc.frontend.tree import Branch, TreeReader
from mbc.resources import folder
from mbc.source import Source

LARGEST_SOURCE = 1_000_000  # characters
KEPT_SOURCES = 8  # recent sources whose trees are kept
DEEPEST_SOURCE = 60  # levels of the syntax tree; every level costs a few frames of Python's stack


@lru_cache(maxsize=KEPT_SOURCES)
def parse(source: Source) -> ast.Program:
    """Return the syntax tree of a whole source; the tree of recent sources is kept.

    Raises:
        MbcError: MBC001 to MBC004, with the place of the mistake.
    """
    places = Places(source)
    return TreeReader(places).program(_tree(source, places, "program"))


@dataclass(frozen=True, slots=True)
class Parsed:
    """A source as Lark reads it, for the formatter."""

    source: Source
    tree: Branch
    tokens: tuple[Token, ...]


def parse_tokens(source: Source) -> Parsed:
    """Return the tokens of a whole source and Lark's tree of them.

    Raises:
        MbcError: MBC001 to MBC003, with the place of the mistake.
    """
    tree = _tree(source, Places(source), "program")
    return Parsed(source, tree, tuple(_tokens(_lark(), source.text)))


def parse_setting(source: Source) -> ast.Expression:
    """Return the expression of `--set NAME=EXPRESSION`; `source` holds only the expression."""
    places = Places(source)
    return TreeReader(places).setting(_tree(source, places, "setting"))


class _Statements(PostLex):
    """Filter of tokens that distinguishes the `if` of a statement (WHEN) from the `if` in an expression."""

    always_accept = ()

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        depth, before = 0, None
        for token in stream:
            depth += (token.type in ("LPAR", "LSQB")) - (token.type in ("RPAR", "RSQB"))
            if token.type == "IF" and depth == 0 and _begins(token, before):
                token = Token.new_borrow_pos("WHEN", token.value, token)
            yield token
            before = token


def _begins(token: Token, before: Token | None) -> bool:
    return before is None or before.type in ("LBRACE", "RBRACE", "ELSE") or (before.line or 0) < (token.line or 0)


@lru_cache(maxsize=1)
def _lark() -> Lark:
    text = (folder("grammar") / "mbc.lark").read_text(encoding="utf-8")
    return Lark(
        text,
        parser="lalr",
        lexer="basic",
        postlex=_Statements(),
        start=["program", "setting"],
        propagate_positions=True,
        maybe_placeholders=True,
    )


def _tree(source: Source, places: Places, start: str) -> Branch:
    if len(source.text) > LARGEST_SOURCE:
        raise MbcError(
            "MBC003",
            f"{source.name} has {len(source.text)} characters; at most {LARGEST_SOURCE} are read",
            "write repeated parts as a block or a loop",
        )
    lark = _lark()
    try:
        tree = cast(Branch, cast(Any, lark).parse(source.text, start=start))
    except UnexpectedCharacters as error:
        raise unexpected_character(source.text, cast(int, error.pos_in_stream), places) from None
    except UnexpectedToken as error:
        token = cast(Token, error.token)
        accepted = frozenset(error.accepts or error.expected)
        raise unexpected_token(token, accepted, _tokens_before(lark, source.text, token), places) from None
    _check_depth(tree, places)
    return tree


def _tokens_before(lark: Lark, text: str, last: Token) -> list[Token]:
    """Return the tokens before `last`."""
    return _tokens(lark, text if last.type == "$END" else text[: last.start_pos or 0])


def _tokens(lark: Lark, text: str) -> list[Token]:
    return list(cast(Iterator[Token], cast(Any, lark).lex(text)))


def _check_depth(tree: Branch, places: Places) -> None:
    """Check the depth of the tree without recursion, because everything after this recurses over the tree."""
    level: list[Branch] = [tree]
    for _ in range(DEEPEST_SOURCE):
        level = [c for t in level for c in cast(list[Any], t.children) if isinstance(c, Tree)]
        if not level:
            return
    meta = next((t.meta for t in level if not t.meta.empty), tree.meta)
    raise MbcError(
        "MBC003",
        f"this is nested too deeply: at most {DEEPEST_SOURCE} levels are read",
        "bind a part of it to a name, or write it as a block",
        places.span(meta.start_pos, meta.end_pos),
    )
