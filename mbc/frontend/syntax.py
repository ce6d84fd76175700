"""Errors of syntax, in plain words."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import pairwise

from lark import Token

from mbc.errors import MbcError
from mbc.frontend.near import nearest
from mbc.frontend.positions import Places
from mbc.frontend.pytorch import Place, answer
from mbc.frontend.tree import wrong_unit
from mbc.ops import LAYERS
from mbc.units import UNIT_BYTES

_VALUES = frozenset({"NAME", "NUMBER", "SIZE", "STRING", "BAD_NUMBER", "LPAR", "SIGN", "NOT", "TRUE", "FALSE"})
_STATEMENTS = frozenset({"NAME", "INPUT", "OUTPUT", "LOSS", "METRIC", "RETURN", "FOR", "WHEN"})
_DECLARATIONS = frozenset({"NETWORK", "BLOCK", "TRAIN", "MEMORY"})
_CONTINUATIONS = frozenset(
    {"COMPARE", "TIMES", "POWER", "SIGN", "IF", "AND", "OR", "LABEL", "DOT", "LSQB", "__ANON_0", "LPAR"}
)
_PUNCTUATION = {
    "LBRACE": "`{`",
    "RBRACE": "`}`",
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "COMMA": "`,`",
    "COLON": "`:`",
    "EQUAL": "`=`",
    "ON": "`on`",
    "IN": "`in`",
    "ELSE": "`else`",
    "IF": "`if`",
    "$END": "the end of the text",
}
_OPENING = {"LBRACE": "RBRACE", "LPAR": "RPAR", "LSQB": "RSQB"}
# Letters of other scripts that look like ASCII ones.
_LOOKALIKES = dict(
    zip(
        "аеорсухіјѕһԁԛԝкмтвнАВЕКМНОРСТУХαορντικΑΒΕΖΗΙΚΜΝΟΡΤΥΧ",
        "aeopcyxijshdqwkmtbhABEKMHOPCTYXaopvtikABEZHIKMNOPTYX",
        strict=False,
    )
)
_QUOTES = 'names and words are written without quotes; only a pattern of names has quotes, as in "head.*"'
_CHARACTER_REMEDIES = {
    '"': 'a pattern of names, as in `frozen`, ends with `"` on its line; nothing else has quotes',
    "'": _QUOTES,
    "`": _QUOTES,
    ";": "statements need no separator: begin the next one on a new line",
    "|": "a tensor is piped into a layer by `|>`",
    "!": "write `not x`, or `a != b`",
    "&": "write `and`",
    "\\": "a statement may continue on the next line without a mark",
    "$": "a name consists of letters, digits and `_`",
    "~": "write `not`",
    "^": "a power is written `**`",
    "@": "a label is letters, digits and `_` after `@`, as in `conv(64, 3) @stem`; parts of a path are joined by dots",
}


def unexpected_character(text: str, offset: int, places: Places) -> MbcError:
    """Return the error of a character that no part of the language uses."""
    character = text[offset]
    name = unicodedata.name(character, "")
    code = f"U+{ord(character):04X}"
    shown = f"`{character}` ({name}, {code})" if name and not character.isascii() else f"`{character}`"
    if not character.isprintable():
        shown = f"the invisible character {name + ', ' if name else ''}{code}"
    plain = _LOOKALIKES.get(character) or unicodedata.normalize("NFKD", character)[0]
    if character in _CHARACTER_REMEDIES:
        remedy = _CHARACTER_REMEDIES[character]
    elif not character.isascii() and plain.isascii() and plain.isprintable() and plain != " ":
        remedy = f"it looks like `{plain}` but is another character: type `{plain}`"
    else:
        remedy = "names consist of the letters a to z and A to Z, digits and `_`; comments begin with `#`"
    return MbcError("MBC001", f"{shown} means nothing here", remedy, places.span(offset, offset + 1))


def unexpected_token(token: Token, accepted: frozenset[str], before: Sequence[Token], places: Places) -> MbcError:
    """Return the error of a token that cannot follow the tokens `before`; `accepted` are the kinds that could."""
    start, end = token.start_pos or 0, token.end_pos or 0
    if token.type == "$END":
        start = (before[-1].end_pos or 1) - 1 if before else 0
        end = start + 1
    span = places.span(start, end)
    unit = _unit(token, before)
    if unit is not None:
        return wrong_unit(f"{unit.value}", unit.value, places.span(unit.start_pos or 0, unit.end_pos or 0))
    opened = _open(before)
    if token.type == "$END" and opened is not None:
        place = places.span(opened.start_pos or 0, opened.end_pos or 0)
        closing = _PUNCTUATION[_OPENING[opened.type]]
        return MbcError("MBC002", f"this `{opened.value}` is never closed", f"add {closing} where it ends", place)
    message = f"{_describe(token)} cannot stand here: expected {_expected(accepted)}"
    return MbcError("MBC002", message, _remedy(token, accepted, before, opened), span)


def _describe(token: Token) -> str:
    if token.type == "$END":
        return "the end of the text"
    if token.type in ("NAME", "NUMBER", "SIZE"):
        return f"the {'name' if token.type == 'NAME' else 'number'} `{token.value}`"
    if token.type == "STRING":
        return f"the text `{token.value}`"
    if token.value.isalpha():
        return f"the word `{token.value}`"
    return f"`{token.value}`"


def _expected(accepted: frozenset[str]) -> str:
    rest = set(accepted)
    parts: list[str] = []
    if rest >= _DECLARATIONS:
        parts += ["`network`", "`block`", "`train`", "`memory`"]
        rest -= _DECLARATIONS
    if "FOR" in rest:
        parts.append("a statement")
        rest -= _STATEMENTS
    elif "NUMBER" in rest:
        parts.append("a value")
        rest -= _VALUES
    if "NAME" in rest:
        parts.append("a name")
    if "LABEL" in rest:  # an expression that could continue; other possible tokens say more
        rest -= _CONTINUATIONS
    if parts or rest - {"IF"}:
        rest -= {"IF"}
    parts += [shown for kind, shown in _PUNCTUATION.items() if kind in rest]
    if not parts:
        parts = ["the expression to go on"]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def _remedy(token: Token, accepted: frozenset[str], before: Sequence[Token], opened: Token | None) -> str:
    last = before[-1] if before else None
    if token.type == "LPAR" and len(before) > 2 and before[-2].type == "DOT" and last is not None:
        return _of_method(last.value)
    if token.type == "LBRACE" and accepted & {"NAME", "NUMBER"}:
        return "braces enclose the body of a block, loop or condition; a source has no templates"
    if token.type in _DECLARATIONS and opened is not None and "FOR" in accepted:
        return f"close the `{{` of line {opened.line} first; `{token.value}` cannot be the name of a tensor"
    if token.type.isupper() and token.value.isalpha() and "NAME" in accepted and token.type != "NAME":
        return f"`{token.value}` is a word of the language and cannot be a name: choose another name"
    if token.type == "ELSE" and any(t.type == "WHEN" for t in before[-40:]):
        return (
            "an `if` that begins a line is a statement with a body in braces; "
            "to choose between two values, keep `A if CONDITION else B` on one line or in parentheses"
        )
    if token.type == "LBRACE" and "ELSE" in accepted:
        return "begin an `if` statement on a line of its own, or choose a value by `A if CONDITION else B`"
    if token.type == "EQUAL" and last is not None and last.type != "NAME" and last.value.isalpha():
        return f"`{last.value}` is a word of the language and cannot be a name: choose another name"
    if token.type == "EQUAL":
        return "`=` binds a name at the start of a statement; to compare, write `==`"
    if token.type == "COMPARE":
        return "comparisons do not chain: join two of them with `and`"
    if token.type == "RBRACE" and opened is None:
        return "remove it: no bracket is open"
    wrong = opened is not None and opened.type != "LBRACE" and token.type in ("RPAR", "RSQB", "RBRACE", "LBRACE")
    if opened is not None and wrong and _OPENING[opened.type] != token.type and not accepted & {"NUMBER"}:
        return f"close the `{opened.value}` of line {opened.line} first"
    if accepted <= {"LSQB"} or accepted <= {"COLON"}:
        return "an input has a shape and a type: `input image[batch, 3, 224, 224] : float`"
    if accepted <= {"EQUAL", "COMMA"}:
        return "a statement that begins with a name binds it: `NAME = VALUE`, or `NAME, NAME = VALUE`"
    if "COMMA" in accepted and "IN" not in accepted and token.type in _VALUES:
        return "put a comma between the items"
    if accepted >= _DECLARATIONS:
        near = nearest(token.value, ("network", "block", "train", "memory"))
        if near is not None:
            return f"did you mean `{near}`?"
        return "a source consists of networks, blocks, a `train` section and a `memory` section"
    return "'The language of mbc, by example' in mbc's documentation shows the form of each statement"


def _of_method(name: str) -> str:
    """Return the remedy for `nn.Linear(…)` and `x.relu()`."""
    equivalent = answer(name, Place.OPERATION, Place.LOSS)
    if equivalent is not None:
        return equivalent.remedy
    near = nearest(name, LAYERS)
    meant = f", such as `{near}`" if near is not None else ""
    return f"there are no methods: tensors are piped into operations by `|>`{meant}"


def _open(tokens: Sequence[Token]) -> Token | None:
    """Return the innermost bracket that is still open."""
    stack: list[Token] = []
    for token in tokens:
        if token.type in _OPENING:
            stack.append(token)
        elif token.type in _OPENING.values() and stack:
            stack.pop()
    return stack[-1] if stack else None


def _unit(token: Token, before: Sequence[Token]) -> Token | None:
    """Return the name that was meant as a unit, because it follows a number on its line."""
    recent = [*before[-2:], token]
    in_memory = any(t.type == "MEMORY" for t in before)
    for number, name in pairwise(recent):
        if number.type == "NUMBER" and name.type == "NAME" and number.line == name.line:
            like = name.value.lower() in {u.lower() for u in UNIT_BYTES} | {"k", "m", "g", "t", "byte", "bytes"}
            if like or in_memory:
                return name
    return None
