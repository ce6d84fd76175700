"""The TextMate grammar of the language, made from the Lark grammar and the names that the compiler knows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from lark import Lark
from lark.lexer import PatternStr

from mbc.frontend.functions import FUNCTIONS
from mbc.frontend.sections import OPTIMIZERS
from mbc.frontend.statements import INPUT_TYPES
from mbc.ir.types import Precision
from mbc.ops import LAYERS
from mbc.resources import folder

CONSTANTS = ("true", "false")
DECLARED = ("network", "block")  # a name follows


def terminals() -> dict[str, str]:
    """Return the terminals of the grammar by name, each as a regular expression."""
    text = (folder("grammar") / "mbc.lark").read_text(encoding="utf-8")
    lark = Lark(text, parser="lalr", start=["program", "setting"])
    return {t.name: re.escape(t.pattern.value) if isinstance(t.pattern, PatternStr) else t.pattern.value
            for t in lark.terminals}  # fmt: skip


def keywords() -> list[str]:
    """Return all keywords of the language."""
    return sorted(pattern for pattern in terminals().values() if pattern.isalpha())


def grammar() -> str:
    """Return the content of the grammar file in docs/vscode."""
    of = terminals()
    words = sorted({word for layer in LAYERS.values() for p in layer.parameters for word in p.words})
    signs = (of[name] for name in ("_PIPE", "COMPARE", "POWER", "TIMES", "SIGN"))
    patterns: list[dict[str, Any]] = [
        {"name": "comment.line.number-sign.mbc", "match": "#.*$"},
        {"name": "string.quoted.double.mbc", "match": of["STRING"]},
        {"name": "entity.name.label.mbc", "match": of["LABEL"]},
        {"match": rf"\b({'|'.join(DECLARED)})\s+({of['NAME']})",
         "captures": {"1": {"name": "keyword.declaration.mbc"}, "2": {"name": "entity.name.type.mbc"}}},
        {"name": "constant.language.mbc", "match": _any(CONSTANTS)},
        {"name": "keyword.control.mbc", "match": _any(word for word in keywords() if word not in CONSTANTS)},
        {"name": "constant.numeric.size.mbc", "match": of["SIZE"]},
        {"name": "constant.numeric.mbc", "match": of["NUMBER"]},
        {"match": rf":\s*({'|'.join(sorted(INPUT_TYPES))})\b", "captures": {"1": {"name": "storage.type.mbc"}}},
        {"name": "variable.parameter.mbc", "match": rf"{of['NAME']}(?==[^=])"},
        {"name": "support.function.mbc", "match": _any(sorted({*LAYERS, *FUNCTIONS, *OPTIMIZERS}))},
        {"name": "support.constant.mbc", "match": _any([*words, *Precision])},
        {"name": "entity.name.function.mbc", "match": rf"{of['NAME']}(?=\()"},
        {"name": "keyword.operator.mbc", "match": "|".join(f"(?:{sign})" for sign in signs) + "|="},
    ]  # fmt: skip
    document = {"name": "mbc", "scopeName": "source.mbc", "fileTypes": ["mbc"], "patterns": patterns}
    return json.dumps(document, indent=2) + "\n"


def _any(words: Iterable[str]) -> str:
    return rf"\b({'|'.join(words)})\b"


def scopes(document: Any, line: str) -> list[tuple[str, str]]:
    """Return the texts of a line with their scopes, as TextMate assigns them.

    The pattern that matches first counts; if several match at one place, the one that is listed first counts. Texts
    that no pattern matches are left out.
    """
    scoped_texts: list[tuple[str, str]] = []
    at = 0
    patterns = [(rule, re.compile(rule["match"], re.ASCII)) for rule in document["patterns"]]
    while True:
        matches = [(match.start(), i, match) for i, (_, p) in enumerate(patterns) if (match := p.search(line, at))]
        if not matches:
            return scoped_texts
        _, i, match = min(matches, key=lambda one: one[:2])
        rule = patterns[i][0]
        if "name" in rule:
            scoped_texts.append((match[0], rule["name"]))
        scoped_texts += [(match[int(n)], group["name"]) for n, group in rule.get("captures", {}).items()]
        at = max(match.end(), at + 1)
