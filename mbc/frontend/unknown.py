"""The errors of names that are not known, each compared with what could stand in its place, and of pipes that bind
otherwise than was meant."""

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
    """MBC006, for what is called or piped into. `functions`: it may be a function as well."""
    known = [*blocks, *LAYERS, *(FUNCTIONS if functions else ())]
    remedy = suggest(name, known, "known operations", Place.OPERATION, Place.LOSS)
    return MbcError("MBC006", f"there is no operation or block `{name}`", remedy, span)


def unknown_loss(name: str, span: Span) -> MbcError:
    """MBC006, for what the operands of a loss are piped into."""
    known = [layer.name for layer in LAYERS.values() if layer.loss]
    remedy = suggest(name, known, "losses", Place.LOSS)
    return MbcError("MBC006", f"there is no loss `{name}`", remedy, span)


def unknown_value(name: str, span: Span, setting: str, words: Iterable[str]) -> MbcError:
    """MBC005, for what a setting is given that takes one of `words`."""
    remedy = suggest(name, words, f"values of `{setting}`", Place.VALUE)
    return MbcError("MBC005", f"`{setting}` cannot be `{name}`", remedy, span)


def unknown_name(name: str, span: Span, frame: Frame, words: Iterable[str]) -> MbcError:
    """MBC005, for a name anywhere else. `words`: what settings take."""
    remedy = suggest(name, [*frame.names(), *words, "true", "false"], "known names", Place.VALUE)
    if remedy.startswith("the known names"):
        bound = frame.names()
        remedy = f"bound here are: {', '.join(sorted(bound)[:24])}" if bound else "no name is bound here yet"
    return MbcError("MBC005", f"the name `{name}` is not known here", remedy, span)


def of_framework(attribute: ast.Attribute, frame: Frame) -> MbcError | None:
    """MBC006, for `nn.ReLU` and the like; None for the attribute of something that is known here."""
    target = attribute.target
    if not isinstance(target, ast.Name) or target.text not in _FRAMEWORKS or frame.get(target.text) is not None:
        return None
    remedy = suggest(attribute.name, LAYERS, "known operations", Place.OPERATION, Place.LOSS)
    return MbcError("MBC006", f"there is no operation `{target.text}.{attribute.name}`", remedy, attribute.span)


def loose_pipe(pipe: ast.Pipe, chain: ast.Chain, layer: Written) -> MbcError:
    """MBC029, for `x |> relu + y`: the stage is `relu + y`. The remedy is the line with the parentheses that were
    probably meant."""
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
    message = f"`|>` binds looser than `{symbol}`: tensors would be piped into `{layer.of.name} {symbol} …`"
    return MbcError("MBC029", message, remedy, span)
