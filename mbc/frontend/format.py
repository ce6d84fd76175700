"""The formatter of sources: `mbc fmt`.

Only indentation and the blanks between tokens change. The lexer drops the text between two tokens, so comments are read
from that text. Line breaks stay where they are, because an `if` that begins a line is a statement. The format depends
only on tokens, comments and line breaks, so that formatting a formatted text changes nothing.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field

from lark import Token

from mbc.frontend.parse import Parsed, parse, parse_tokens
from mbc.source import Source

INDENT = 2  # indentation of a body in its braces
CONTINUED = 4  # indentation of a line that continues a statement and is aligned with nothing; differs from a body's
BEFORE_COMMENT = 2  # blanks before a comment
BETWEEN_STATEMENTS = 2  # blanks between statements on one line, which nothing else separates

_BLANKS = " \t\f\r\ufeff"  # characters that the lexer ignores, besides line ends
_STATEMENTS = frozenset(
    {"network", "block", "section", "entry", "input", "output", "loss", "metric", "return", "for", "when", "assign"}
)
_VALUES = frozenset({"NAME", "NUMBER", "SIZE", "STRING", "TRUE", "FALSE", "RPAR", "RSQB", "LABEL"})  # end an operand
_OPENING, _CLOSING = frozenset({"LPAR", "LSQB"}), frozenset({"RPAR", "RSQB"})
_TIGHT_BEHIND = _OPENING | {"DOT"}  # no blank follows these
_TIGHT_BEFORE = _CLOSING | {"COMMA", "DOT", "LSQB"}  # no blank precedes these
_PIPE = "|>"


def format_source(source: Source) -> str:
    r"""Return the formatted source, whose lines end with `\n`.

    Raises:
        MbcError: The source cannot be parsed.
    """
    read = Source(source.name, io.StringIO(source.text, newline=None).read())  # line ends as those of a file
    parse(read)
    parsed = parse_tokens(read)
    text = _Layout(parsed).text()
    said = parse_tokens(Source(read.name, text)).tokens
    assert [(t.type, t.value) for t in said] == [(t.type, t.value) for t in parsed.tokens], (
        "the layout changed the tokens"
    )
    return text


@dataclass(frozen=True, slots=True)
class _Gap:
    """The text between two tokens.

    Attributes:
        trailing: The comment after the first token.
        lines: Comments on lines of their own, and "" for each blank line.
        broken: Whether the second token begins a line.
    """

    trailing: str
    lines: tuple[str, ...]
    broken: bool


def _gap(text: str, first: bool) -> _Gap:
    """Return the gap that a text represents.

    With `first`, the text begins the source, and no comment can follow a token.
    """
    lines = [line.strip(_BLANKS) for line in text.split("\n")]
    broken = len(lines) > 1
    trailing = "" if first else lines.pop(0)
    if lines and not lines[-1]:
        lines.pop()  # the line of the second token
    return _Gap(trailing, tuple(line for i, line in enumerate(lines) if line or i == 0 or lines[i - 1]), broken)


@dataclass(slots=True)
class _Bracket:
    """An open bracket, or (the outermost) the statement.

    Attributes:
        inside: Indentation of lines in it.
        closed: Indentation of the line of its closing bracket.
        call: Whether its `=` give settings.
        pipe: Column of the first pipe of an item, under which the next pipes are placed.
    """

    inside: int
    closed: int
    call: bool
    pipe: int | None = None


@dataclass(slots=True)
class _Layout:
    parsed: Parsed
    _lines: list[str] = field(default_factory=list[str])
    _line: str = ""
    _indent: int = 0  # indentation of the current line
    _statement: int = 0  # indentation of the line on which the statement begins
    _bodies: list[int] = field(default_factory=list[int])  # by open brace: indentation of its statement
    _brackets: list[_Bracket] = field(default_factory=lambda: [_Bracket(0, 0, False)])

    def text(self) -> str:
        tokens, text = self.parsed.tokens, self.parsed.source.text
        starts = {node.meta.start_pos for node in self.parsed.tree.iter_subtrees() if node.data in _STATEMENTS}
        ends = [0, *(token.end_pos or 0 for token in tokens)]
        begins = [*(token.start_pos or 0 for token in tokens), len(text)]
        gaps = [_gap(text[end:begin], not i) for i, (end, begin) in enumerate(zip(ends, begins, strict=True))]
        for i, token in enumerate(tokens):
            before = tokens[i - 1] if i else None
            starting = token.start_pos in starts
            if before is None or gaps[i].broken:
                self._break(gaps[i], token, starting, before)
            elif starting and before.type not in ("LBRACE", "RBRACE", "ELSE"):
                self._line += " " * BETWEEN_STATEMENTS
            elif _spaced(tokens, i, self._brackets[-1].call):
                self._line += " "
            self._place(token, before, starting, gaps[i + 1].broken)
        self._end_line(gaps[-1].trailing)
        self._lines += gaps[-1].lines
        return "\n".join(self._lines).strip("\n") + ("\n" if any(self._lines) else "")

    def _end_line(self, comment: str) -> None:
        if self._line:
            self._lines.append(self._line + (" " * BEFORE_COMMENT + comment if comment else ""))

    def _break(self, gap: _Gap, token: Token, starting: bool, before: Token | None) -> None:
        """End the line; write the comments that follow and the indentation of the next line."""
        self._end_line(gap.trailing)
        self._indent = commented = self._indentation(token, starting, before)
        if token.type == "RBRACE":
            commented = self._bodies[-1] + INDENT
        elif token.type in _CLOSING:
            commented = self._brackets[-1].inside
        self._lines += [" " * commented + line if line else "" for line in gap.lines]
        self._line = " " * self._indent

    def _indentation(self, token: Token, starting: bool, before: Token | None) -> int:
        """Return the indentation of a line that begins with the token."""
        bracket = self._brackets[-1]
        if len(self._brackets) > 1 and token.type in _CLOSING:
            return bracket.closed
        if token == _PIPE and bracket.pipe is not None:
            return bracket.pipe
        if len(self._brackets) > 1:
            return bracket.inside
        if token.type == "RBRACE":
            return self._bodies[-1]
        if token.type == "LBRACE" or (token.type == "ELSE" and before is not None and before.type == "RBRACE"):
            return self._statement
        if starting:
            return self._bodies[-1] + INDENT if self._bodies else 0
        return self._statement + CONTINUED

    def _place(self, token: Token, before: Token | None, starting: bool, last: bool) -> None:
        """Write a token; `last`: it is the last token of its line."""
        column = len(self._line)
        self._line += token.value
        if starting:
            if column == self._indent:
                self._statement = column
            self._brackets[-1].pipe = None
        if token.type in _OPENING:
            call = token.type == "LPAR" and before is not None and before.type == "NAME" and not self._declaring
            hanging = _Bracket(self._indent + INDENT, self._indent, call)
            self._brackets.append(hanging if last else _Bracket(column + 1, column, call))
        elif token.type in _CLOSING:
            self._brackets.pop()
        elif token.type == "COMMA":
            self._brackets[-1].pipe = None
        elif token == _PIPE and self._brackets[-1].pipe is None:
            self._brackets[-1].pipe = column
        elif token.type == "LBRACE":
            self._bodies.append(self._statement)
        elif token.type == "RBRACE":
            self._statement = self._bodies.pop()

    @property
    def _declaring(self) -> bool:
        """True in the head of a network or block, whose parentheses hold parameters and their defaults."""
        return not self._bodies and len(self._brackets) == 1


def _spaced(tokens: Sequence[Token], i: int, call: bool) -> bool:
    """Return whether a blank is between token `i` and the one before it. With `call` both are among settings."""
    before, token = tokens[i - 1], tokens[i]
    if token.type == "DOT":
        return before.type == "NUMBER"  # without a blank they would be another number
    if token.type in _TIGHT_BEFORE or before.type in _TIGHT_BEHIND or (call and "EQUAL" in (before.type, token.type)):
        return False
    if before.type == "SIGN":
        return i > 1 and tokens[i - 2].type in _VALUES  # otherwise it is the sign of a number
    return token.type != "LPAR" or before.type != "NAME"
