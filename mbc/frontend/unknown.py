"""Errors of unknown names, with the nearest possible name, and of pipes with a surprising precedence."""

from __future__ import annotations

from collections.abc import Iterable

from mbc.errors import MbcError
from mbc.frontend import ast
from mbc.frontend.frame import Frame
from mbc.frontend.functions import FUNCTIONS
from mbc.frontend.near import suggest
from mbc.frontend.pytorch import Place
from mbc.frontend.values import Written
from mbc.ops import LAYERS
from mbc.source import Span

_FRAMEWORKS = ("nn", "F", "torch", "functional", "keras", "layers", "tf", "jax")


def unknown_operation(name: str, span: Span, blocks: Iterable[str], functions: bool = False) -> MbcError:
    """Return MBC006 for an unknown call or stage of a pipe; `functions`: a function is possible as well."""
    names = [*blocks, *LAYERS, *(FUNCTIONS if functions else ())]
    remedy = suggest(name, names, "known operations", Place.OPERATION, Place.LOSS)
    return MbcError("MBC006", f"there is no operation or block `{name}`", remedy, span)


def unknown_loss(name: str, span: Span) -> MbcError:
    """Return MBC006 for an unknown stage into which the operands of a loss are piped."""
    names = [layer.name for layer in LAYERS.values() if layer.loss]
    remedy = suggest(name, names, "losses", Place.LOSS)
    return MbcError("MBC006", f"there is no loss `{name}`", remedy, span)


def unknown_value(name: str, span: Span, setting: str, words: Iterable[str]) -> MbcError:
    """Return MBC005 for an unknown value of a setting that accepts `words`."""
    remedy = suggest(name, words, f"values of `{setting}`", Place.VALUE)
    return MbcError("MBC005", f"`{setting}` cannot be `{name}`", remedy, span)


def unknown_name(name: str, span: Span, frame: Frame, words: Iterable[str]) -> MbcError:
    """Return MBC005 for an unknown name in another place; `words` are those that settings accept."""
    remedy = suggest(name, [*frame.names(), *words, "true", "false"], "known names", Place.VALUE)
    if remedy.startswith("the known names"):
        bound = frame.names()
        remedy = f"bound here are: {', '.join(sorted(bound)[:24])}" if bound else "no name is bound here yet"
    return MbcError("MBC005", f"the name `{name}` is not known here", remedy, span)


def of_framework(attribute: ast.Attribute, frame: Frame) -> MbcError | None:
    """Return MBC006 for names such as `nn.ReLU`; None for an attribute of a known name."""
    target = attribute.target
    if not isinstance(target, ast.Name) or target.text not in _FRAMEWORKS or frame.get(target.text) is not None:
        return None
    remedy = suggest(attribute.name, LAYERS, "known operations", Place.OPERATION, Place.LOSS)
    return MbcError("MBC006", f"there is no operation `{target.text}.{attribute.name}`", remedy, attribute.span)


def loose_pipe(pipe: ast.Pipe, chain: ast.Chain, layer: Written) -> MbcError:
    """Return MBC029 for `x |> relu + y`, whose stage is `relu + y`.

    The remedy is the line with the parentheses that were probably meant.
    """
    symbol, _, span = chain.rest[0]
    begin, source = pipe.span, span.source
    if begin.line == span.line:
        line = source.line(span.line)
        piped = line[begin.column - 1 : span.column - 1].rstrip()
        remedy = f"write `{f'{line[: begin.column - 1]}({piped}) {line[span.column - 1 :]}'.strip()}`"
    else:
        first, last = source.line(begin.line), source.line(span.line)
        remedy = (
            f"put the pipe in parentheses: `{f'{first[: begin.column - 1]}({first[begin.column - 1 :]}'.strip()}` in "
            f"line {begin.line}, and `{f'{last[: span.column - 1].rstrip()}) {last[span.column - 1 :]}'.strip()}` in "
            f"line {span.line}"
        )
    message = f"`|>` has lower precedence than `{symbol}`: tensors would be piped into `{layer.of.name} {symbol} …`"
    return MbcError("MBC029", message, remedy, span)
