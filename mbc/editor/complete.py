"""Completions at a position: operations, settings, entries, variables and words of the language."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mbc.editor.scan import DECLARATIONS, OPERATORS, STATEMENTS, Declaration, Scan, Word, callee, scan
from mbc.frontend.functions import FUNCTION_HELP
from mbc.frontend.sections import AUTO, ENTRIES, OPTIMIZERS
from mbc.frontend.statements import INPUT_TYPES
from mbc.ir.text import setting_text
from mbc.ir.types import Precision
from mbc.ops import LAYERS
from mbc.ops.base import Layer, Parameter


@dataclass(frozen=True, slots=True)
class Offer:
    """A completion, with a detail of one line.

    Its kind is operation, block, function, setting, entry, word, value, or the kind of a binding.
    """

    label: str
    kind: str
    detail: str = ""
    help: str = ""


def complete(text: str, offset: int) -> list[Offer]:
    """Return the completions at an offset, each once; a word that is begun there is ignored."""
    scanned = scan(text)
    at = next(
        (w for w in scanned.words if w.start < offset <= w.end and (w.text[0].isalpha() or w.text[0] == "_")), None
    )
    place = offset if at is None else at.start
    if _in_comment(text, place):
        return []
    before = [word for word in scanned.words if word.end <= place]
    return list({offer.label: offer for offer in _offers(scanned, before, place)}.values())


def signature(name: str, parameters: Sequence[Parameter]) -> str:
    """Format a signature such as `conv(channels, kernel, stride = 1)`."""
    shown = (p.name if p.default is None else f"{p.name} = {setting_text(p.default)}" for p in parameters)
    return f"{name}({', '.join(shown)})"


def layer_detail(layer: Layer) -> str:
    """Return the signature of a layer, and the number of tensors that are piped into it."""
    least, most = layer.inputs
    several = f"{least}" if most == least else f"{least} or more" if most is None else f"{least} to {most}"
    tensors = "" if (least, most) == (1, 1) else f", {several} tensors" if least else ", needs no tensor"
    return signature(layer.name, layer.parameters) + tensors


def _in_comment(text: str, offset: int) -> bool:
    return "#" in text[text.rfind("\n", 0, offset) + 1 : offset]


def _offers(scanned: Scan, before: Sequence[Word], place: int) -> Iterator[Offer]:
    inside = scanned.at(place)
    last = before[-1].text if before else ""
    depth = sum((w.text == "{") - (w.text == "}") for w in before if inside is not None and w.start >= inside.start)
    if inside is None or (depth <= 0 and last in ("}", "")):
        yield from _words(DECLARATIONS)
        return
    called, given = callee(before)
    if last == "|>":
        yield from _applied(scanned, inside, place)
    elif last == ".":
        yield Offer("shape", "word", "a tuple of whole numbers")
    elif last == ":":
        yield from (Offer(kind, "word", "of an input") for kind in INPUT_TYPES)
    elif called is not None:
        yield from _of_call(scanned, inside, place, called, given)
    elif inside.kind in ENTRIES:
        yield from _of_section(inside.kind, before)
    elif depth > 0 and _begins_statement(before):
        yield from _words(STATEMENTS)
        yield from _bound(inside, place)
    elif depth > 0:
        yield from _values(scanned, inside, place)


def _begins_statement(before: Sequence[Word]) -> bool:
    """Return whether a statement can begin after these words: an operand or a brace ends the previous statement."""
    last = before[-1].text
    return last in ("{", "}", ")", "]") or (before[-1].named and before[-2].text not in ("for", ","))


def _words(words: Iterable[str]) -> Iterator[Offer]:
    return (Offer(word, "word") for word in words)


def _bound(inside: Declaration, place: int) -> Iterator[Offer]:
    return (Offer(b.word.text, b.what) for b in inside.bindings if b.since <= place)


def _applied(scanned: Scan, inside: Declaration, place: int) -> Iterator[Offer]:
    """Yield completions that accept piped tensors."""
    yield from (Offer(name, "operation", layer_detail(layer), layer.help) for name, layer in LAYERS.items())
    yield from _blocks(scanned)
    yield from _bound(inside, place)


def _blocks(scanned: Scan) -> Iterator[Offer]:
    for declaration in scanned.declarations:
        if declaration.kind == "block" and declaration.name is not None:
            name = declaration.name.text
            yield Offer(name, "block", f"{name}({', '.join(_parameters(declaration))})")


def _parameters(declaration: Declaration) -> list[str]:
    return [b.word.text for b in declaration.bindings if b.what == "parameter"]


def _values(scanned: Scan, inside: Declaration, place: int) -> Iterator[Offer]:
    """Yield the parts of an expression."""
    yield from _bound(inside, place)
    yield from (Offer(name, "function", help_text) for name, help_text in FUNCTION_HELP.items())
    yield from _words(OPERATORS)
    yield from (
        Offer(name, "operation", layer_detail(layer), layer.help) for name, layer in LAYERS.items()
    )  # a layer bound to a name is shared; some layers need no tensor
    yield from _blocks(scanned)


def _of_call(scanned: Scan, inside: Declaration, place: int, called: Word, given: Sequence[Word]) -> Iterator[Offer]:
    """Yield the settings of a call that are not given yet, or the values of a setting."""
    block = scanned.block(called.text)
    parameters = LAYERS[called.text].parameters if called.text in LAYERS else OPTIMIZERS.get(called.text, ())
    last = given[-1].text if given else ""
    if last in ("", ","):
        named = {name.text for name, equals in pairwise(given) if equals.text == "="}
        names = [p.name for p in parameters] if block is None else _parameters(block)
        details = {p.name: signature(called.text, [p]) for p in parameters}
        yield from (Offer(f"{name}=", "setting", details.get(name, "")) for name in names if name not in named)
    name = given[-2].text if last == "=" and len(given) > 1 else ""
    words = [word for p in parameters for word in p.words if name in ("", p.name)]
    yield from (Offer(word, "value", f"of {called.text}") for word in words)
    if any(p.name == name and p.kind == "bool" for p in parameters):
        yield from _words(("true", "false"))
    elif inside.kind not in ENTRIES:
        yield from _values(scanned, inside, place)


def _of_section(section: str, before: Sequence[Word]) -> Iterator[Offer]:
    entry = before[-2].text if before[-1].text == "=" else ""
    if not entry:
        yield from (Offer(f"{name} = ", "entry", f"of {section}") for name in ENTRIES[section])
    elif entry == "optimizer":
        yield from (Offer(name, "operation", signature(name, of)) for name, of in OPTIMIZERS.items())
    elif entry == "precision":
        yield from (Offer(precision, "value") for precision in Precision)
    else:
        yield from _words((AUTO, "true", "false"))
