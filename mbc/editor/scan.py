"""The words of a text, its declarations, and the places where names are bound.

A text seldom parses while it is edited, so this module reads any text, by words alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"#[^\n]*|\"[^\"\n]*\"?|@[ \t]*[\w.]*|[A-Za-z_]\w*|[0-9.]*[0-9]\w*|\|>|\*\*|//|[=!<>]=|\S", re.ASCII
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
DECLARATIONS = ("network", "block", "train", "memory")
STATEMENTS = ("input", "output", "loss", "metric", "return", "for", "if")
OPERATORS = ("if", "else", "and", "or", "not", "true", "false")  # words inside of expressions
OTHER_WORDS = ("on", "in")
KEYWORDS = frozenset((*DECLARATIONS, *STATEMENTS, *OPERATORS, *OTHER_WORDS))


@dataclass(frozen=True, slots=True)
class Word:
    """A token at the offsets `start` to `end`; `first` says whether it is the first of its line."""

    text: str
    start: int
    end: int
    first: bool

    @property
    def named(self) -> bool:
        """True for a name, which is not a word of the language."""
        return bool(_NAME.fullmatch(self.text)) and self.text not in KEYWORDS


@dataclass(frozen=True, slots=True)
class Binding:
    """A name at the place `word` that is valid from the offset `since`.

    Its kind `what` is parameter, tensor (of a block), input, loop or variable.
    """

    word: Word
    what: str
    since: int


@dataclass(slots=True)
class Declaration:
    """A network, block or section between the offsets `start` and `end` (of the text, where it is not closed)."""

    kind: str
    name: Word | None
    start: int
    end: int
    bindings: list[Binding] = field(default_factory=list[Binding])

    def named(self, name: str, what: str = "") -> list[Binding]:
        """Return the bindings of a name, of kind `what` if given."""
        return [b for b in self.bindings if b.word.text == name and what in ("", b.what)]


@dataclass(frozen=True, slots=True)
class Scan:
    """A whole text. `words` are without comments."""

    words: tuple[Word, ...]
    declarations: tuple[Declaration, ...]

    def at(self, offset: int) -> Declaration | None:
        """Return the declaration around an offset."""
        return next((d for d in self.declarations if d.start <= offset <= d.end), None)

    def word_at(self, offset: int) -> int | None:
        """Return the index of the word at an offset, or just before it."""
        return next(
            (i for i, w in enumerate(self.words) if w.start <= offset <= w.end and w.text[0] not in ",()"), None
        )

    def block(self, name: str) -> Declaration | None:
        """Return the declaration of a block."""
        return next((d for d in self.declarations if d.kind == "block" and d.name and d.name.text == name), None)


def scan(text: str) -> Scan:
    """Return the words of a text and its declarations."""
    words = tuple(_words(text))
    declarations: list[Declaration] = []
    depth = 0
    for i, word in enumerate(words):
        if depth == 0 and word.text in DECLARATIONS:
            if declarations:
                declarations[-1].end = min(declarations[-1].end, word.start - 1)
            name = words[i + 1] if i + 1 < len(words) and words[i + 1].named else None
            declarations.append(Declaration(word.text, name, word.start, len(text)))
        depth += (word.text == "{") - (word.text == "}")
        if word.text == "}" and depth <= 0:
            depth = 0
            if declarations:
                declarations[-1].end = min(declarations[-1].end, word.end)
    for declaration in declarations:
        inside = [word for word in words if declaration.start <= word.start < declaration.end]
        declaration.bindings += _bindings(inside, declaration.end)
    return Scan(words, tuple(declarations))


def callee(words: Sequence[Word]) -> tuple[Word | None, Sequence[Word]]:
    """Return the name before the innermost open parenthesis, and the words after it; None if no parenthesis is open."""
    open_at: list[int] = []
    for i, word in enumerate(words):
        if word.text in "([":
            open_at.append(i)
        elif word.text in ")]" and open_at:
            open_at.pop()
        elif word.text in "{}" or word.text in DECLARATIONS:
            open_at.clear()
    if not open_at:
        return None, ()
    at = open_at[-1]
    called = words[at].text == "(" and at > 0 and words[at - 1].named
    return (words[at - 1] if called else None), words[at + 1 :]


def _words(text: str) -> Iterator[Word]:
    line = -1  # end of the last word
    for match in _TOKEN.finditer(text):
        if match[0][0] != "#":
            yield Word(match[0], match.start(), match.end(), line < 0 or "\n" in text[line : match.start()])
        line = match.end()


def _bindings(words: Sequence[Word], end: int) -> Iterator[Binding]:
    """Yield the bindings of a declaration: parameters and tensors, inputs, loop variables, and assigned names."""
    body = next((i for i, word in enumerate(words) if word.text == "{"), len(words))
    yield from _of_head(words[2:body])
    if words and words[0].text not in ("network", "block"):
        return
    brackets = 0
    waiting: list[Word] = []  # of the assignment that is being read: they are bound after it
    for i, word in enumerate(words[body:], body):
        assigned = _assigned(words, i) if brackets == 0 else []
        if brackets == 0 and (assigned or _begins_statement(word)):
            yield from (Binding(w, "variable", word.start) for w in waiting)
            waiting = assigned
        if word.text == "input" and i + 1 < len(words) and words[i + 1].named:
            yield Binding(words[i + 1], "input", words[i + 1].start)
        if word.text == "for":
            for name in words[i + 1 :]:
                if name.text == "in":
                    break
                if name.named:
                    yield Binding(name, "loop", name.start)
        brackets = max(0, brackets + (word.text in "([") - (word.text in ")]"))
    yield from (Binding(word, "variable", end) for word in waiting)


def _of_head(words: Sequence[Word]) -> Iterator[Binding]:
    """Yield the parameters with their defaults, then the tensors after `on`."""
    brackets, what = 0, "parameter"
    for i, word in enumerate(words):
        brackets += (word.text in "([") - (word.text in ")]")
        if word.text == "on":
            what = "tensor"
        before = words[i - 1].text if i else ""
        separated = (brackets == 1 and before in "(,") or (what == "tensor" and before == "on")
        if word.named and separated and before:
            yield Binding(word, what, word.start)


def _begins_statement(word: Word) -> bool:
    return word.text in "{}" or (word.text in STATEMENTS and (word.text != "if" or word.first))


def _assigned(words: Sequence[Word], i: int) -> list[Word]:
    """Return the names that are assigned if word `i` is the first of `a, b = ...`."""
    if not words[i].named or (i and words[i - 1].text in (",", "metric")):
        return []
    names = [words[i]]
    for comma, name in zip(words[i + 1 :: 2], words[i + 2 :: 2], strict=False):
        if comma.text != "," or not name.named:
            break
        names.append(name)
    behind = i + 2 * len(names) - 1
    return names if behind < len(words) and words[behind].text == "=" else []


def definition(text: str, offset: int) -> Word | None:
    """Return where the name at an offset is bound or declared: a block, a parameter, or the assignment before it."""
    scanned = scan(text)
    at = scanned.word_at(offset)
    if at is None or not scanned.words[at].named:
        return None
    word = scanned.words[at]
    behind = scanned.words[at + 1].text if at + 1 < len(scanned.words) else ""
    called, _ = callee(scanned.words[:at])
    block = scanned.block(called.text) if called is not None and behind == "=" else scanned.block(word.text)
    if block is not None:
        parameter = block.named(word.text, "parameter")
        return parameter[0].word if called is not None and behind == "=" and parameter else block.name
    inside = scanned.at(offset)
    bindings = inside.named(word.text) if inside is not None else []
    before = [b for b in bindings if b.since <= word.start or b.word == word]
    return (before or bindings)[-1 if before else 0].word if bindings else None
