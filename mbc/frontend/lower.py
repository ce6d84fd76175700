"""Syntax tree -> Network: one network of a source is expanded, with the settings of the command line."""

from __future__ import annotations

import keyword
from collections.abc import Iterable
from dataclasses import dataclass

from mbc.errors import MbcError
from mbc.frontend import ast
from mbc.frontend.frame import Frame
from mbc.frontend.functions import FUNCTIONS
from mbc.frontend.names import Scope
from mbc.frontend.near import suggest
from mbc.frontend.parameter_entries import check_frozen, check_patterns
from mbc.frontend.parse import parse_setting
from mbc.frontend.sections import AUTO, ENTRIES, OPTIMIZERS, read_sections
from mbc.frontend.statements import Expansion
from mbc.frontend.values import Result, WordValue, describe
from mbc.ir.graph import Network, Optimizer
from mbc.ir.types import Precision
from mbc.ops import LAYERS
from mbc.ops.normalization import synchronised
from mbc.options import BATCH, DEVICE_MEMORY, Overrides, Settings
from mbc.source import Source, Span

_NONE = Overrides()


@dataclass(frozen=True, slots=True)
class Lowered:
    """A network and its training settings.

    Attributes:
        network: The network.
        optimizer: The optimizer.
        precision: The precision.
        deterministic: Whether results must have equal bits in every run.
        allow_emulated_fp32: Whether kernels may emulate fp32.
        shard_optimizer: Whether the optimizer's states are sharded over several GPUs; None: the planner decides.
        device_bytes: Limit of device memory; None: `auto`.
        host_bytes: Limit of host memory; None: `auto`.
        peer_bytes: Limit of the memory of another GPU.
        settings: The parameters of the network with their values, as text.
    """

    network: Network
    optimizer: Optimizer
    precision: Precision
    deterministic: bool
    allow_emulated_fp32: bool
    shard_optimizer: bool | None
    device_bytes: int | None
    host_bytes: int | None
    peer_bytes: int
    settings: tuple[tuple[str, str], ...]


def lower(
    program: ast.Program, settings: Settings = (), network: str | None = None, overrides: Overrides = _NONE
) -> Lowered:
    """Expand one network of the program, and return it.

    Args:
        program: The source.
        settings: Pairs (name, value) of `--set`: parameters of the network by name, entries of sections by dotted name.
        network: Name of the network, if there are several.
        overrides: Values that replace the settings.

    Raises:
        MbcError: MBC003 to MBC039.
    """
    try:
        return _lower(program, settings, network, overrides)
    except RecursionError:
        message = "blocks, loops and conditions are nested too deeply here"
        raise MbcError("MBC018", message, "nest less deeply, or write a loop", program.span) from None


def _lower(program: ast.Program, settings: Settings, network: str | None, overrides: Overrides) -> Lowered:
    chosen = choose_network(program, network)
    given = _read_settings(settings, overrides, chosen)
    expansion = Expansion({block.name: block for block in program.blocks}, _words())
    dotted = {name: value for name, value in given.items() if "." in name}
    outside = Frame(Scope(""))
    sections = read_sections(program.sections, dotted, expansion.evaluator, outside)
    frame = Frame(Scope(""))
    parameters = _bind_parameters(chosen, given, expansion, frame)
    expansion.run_network(chosen, frame)
    finished = _finish(chosen, expansion)
    check_patterns(finished, sections.patterns)
    check_frozen(finished, sections.frozen)
    return Lowered(
        synchronised(finished) if sections.sync_batch_norm else finished,
        sections.rule,
        sections.precision,
        sections.deterministic,
        sections.allow_emulated_fp32,
        sections.shard_optimizer,
        sections.device_bytes,
        sections.host_bytes,
        sections.peer_bytes,
        parameters,
    )


def _words() -> frozenset[str]:
    """Return all words that settings accept."""
    of_layers = {word for layer in LAYERS.values() for p in layer.parameters for word in p.words}
    return frozenset({*of_layers, *OPTIMIZERS, AUTO, *(p.value for p in Precision)})


def _check_declarations(program: ast.Program) -> None:
    """Check that no name is declared twice or has another meaning."""
    _check_twice("network", ((n.name, n.span) for n in program.networks))
    _check_twice("block", ((b.name, b.span) for b in program.blocks))
    _check_twice("section", ((s.name, s.span) for s in program.sections))
    declared = {block.name for block in program.blocks}
    for name, span in [(b.name, b.span) for b in program.blocks]:
        if name in FUNCTIONS:
            raise MbcError("MBC035", f"`{name}` is the name of a function", "choose another name for the block", span)
    for owner in (*program.networks, *program.blocks):
        names = [(p.name, p.span) for p in owner.parameters]
        if isinstance(owner, ast.Block):
            names += [(t.text, t.span) for t in owner.tensors]
        _check_twice("parameter", names)
        for name, span in names:
            if name in FUNCTIONS or name in declared:
                message = f"`{name}` is the name of a function or block"
                raise MbcError("MBC035", message, "choose another name for the parameter", span)


def _check_twice(what: str, names: Iterable[tuple[str, Span]]) -> None:
    seen: dict[str, Span] = {}
    for name, span in names:
        if name in seen:
            message = f"there are two {what}s `{name}`; the first is in line {seen[name].line}"
            raise MbcError("MBC012", message, "rename or remove one of them", span)
        seen[name] = span


def choose_network(program: ast.Program, name: str | None) -> ast.Network:
    """Return the network called `name`, or the only network.

    Raises:
        MbcError: MBC012 or MBC035 if declarations clash, MBC023 if there is no such network, or more than one, MBC039
            for a name that Python cannot import.
    """
    _check_declarations(program)
    names = [n.name for n in program.networks]
    if not names:
        raise MbcError("MBC023", "the source has no network", "write `network NAME { … }`", program.span)
    if name is None and len(names) > 1:
        message = f"the source has {len(names)} networks: {', '.join(names)}"
        raise MbcError("MBC023", message, "choose one by --network NAME", program.networks[1].span)
    chosen = next((n for n in program.networks if name in (None, n.name)), None)
    if chosen is None:
        raise MbcError("MBC023", f"the source has no network `{name}`", suggest(name or "", names, "networks"))
    if keyword.iskeyword(chosen.name) or keyword.issoftkeyword(chosen.name):
        message = f"`{chosen.name}` is a word of Python, which imports the module under the network's name"
        raise MbcError("MBC039", message, "choose another name for the network", chosen.span)
    return chosen


def _read_settings(settings: Settings, overrides: Overrides, network: ast.Network) -> dict[str, ast.Expression]:
    """Return expressions by parameter name or dotted name. If a name is set twice, the last value counts."""
    names = [p.name for p in network.parameters]
    names += [f"{section}.{entry}" for section, entries in ENTRIES.items() for entry in entries]
    expressions: dict[str, ast.Expression] = {}
    values = _values(overrides)
    for name, text in (*settings, *overrides.settings):
        if name not in names:
            message = f"--set {name}: network `{network.name}` has no such setting"
            raise MbcError("MBC021", message, suggest(name, names, "settings"))
        if not text.strip():
            raise MbcError("MBC022", f"--set {name} has no value", f"write --set {name}=VALUE")
        expressions[name] = values[name] if name in values else parse_setting(Source(f"--set {name}", text))
    return expressions


def _values(overrides: Overrides) -> dict[str, ast.Expression]:
    """Return the values that replace settings, by the names of these."""
    spans = {name: Span(Source(f"--set {name}", text), 1, 1, len(text)) for name, text in overrides.settings}
    values: dict[str, ast.Expression] = {}
    if overrides.batch is not None:
        values[BATCH] = ast.Number(spans[BATCH], overrides.batch)
    if overrides.device_bytes is not None:
        values[DEVICE_MEMORY] = ast.Size(spans[DEVICE_MEMORY], overrides.device_bytes)
    return values


def _bind_parameters(
    network: ast.Network, overrides: dict[str, ast.Expression], expansion: Expansion, frame: Frame
) -> tuple[tuple[str, str], ...]:
    """Bind the network's parameters, and return their values as text."""
    shown: list[tuple[str, str]] = []
    for parameter in network.parameters:
        default = parameter.default
        override = overrides.get(parameter.name)
        if default is None and override is None:
            message = f"network `{network.name}` needs `{parameter.name}`"
            raise MbcError("MBC008", message, f"give it by --set {parameter.name}=VALUE", parameter.span)
        result = None if default is None else expansion.evaluator.evaluate(default, frame)
        if override is not None:
            # The command line's expressions may not use the parameters bound so far.
            given = _given(parameter.name, override, result, expansion, Frame(frame.scope))
            if result is not None and _kind(given) != _kind(result):
                message = f"`{parameter.name}` is {describe(result)} in the source, but --set gives {describe(given)}"
                raise MbcError("MBC022", message, "give a value of the same kind", override.span)
            result = given
        assert result is not None
        frame.bind_here(parameter.name, result)
        shown.append((parameter.name, _text(result)))
    return tuple(shown)


def _given(name: str, override: ast.Expression, default: Result | None, expansion: Expansion, nothing: Frame) -> Result:
    """Return the value that --set gives to a parameter; the error of an unknown name says what the parameter takes."""
    try:
        return expansion.evaluator.evaluate(override, nothing)
    except MbcError as error:
        if error.code != "MBC005" or "did you mean" in error.remedy:
            raise
        takes = "a value" if default is None else f"a {_kind(default)}"
        if default is None or _kind(default) == "number":
            takes += " (or an expression of numbers)"
        remedy = f"`{name}` takes {takes}: write --set {name}={'VALUE' if default is None else _text(default)}"
        raise MbcError(error.code, error.message, remedy, error.span) from error


def _kind(result: Result) -> str:
    return "number" if isinstance(result, int | float) and not isinstance(result, bool) else type(result).__name__


def _text(result: Result) -> str:
    if isinstance(result, bool):
        return "true" if result else "false"
    if isinstance(result, tuple):
        return f"({', '.join(map(_text, result))}{',' if len(result) == 1 else ''})"
    if isinstance(result, WordValue):
        return result.text
    return str(result) if isinstance(result, int | float) else describe(result)


def _finish(network: ast.Network, expansion: Expansion) -> Network:
    """Return the network, after checking that it is complete and has no unused results."""
    missing = {"input": expansion.inputs, "output": expansion.outputs, "loss": expansion.losses}
    examples = {
        "input": "input image[batch, 3, 224, 224] : float",
        "output": "output logits",
        "loss": "loss (logits, target) |> softmax_cross_entropy",
    }
    for word, declared in missing.items():
        if not declared:
            message = f"network `{network.name}` has no {word}"
            raise MbcError("MBC020", message, f"add a line such as: {examples[word]}", network.span)
    building = expansion.building
    losses = expansion.total_losses()
    outputs = tuple(tensor.value for tensor, _ in expansion.outputs)
    metrics = tuple((name, result.terms) for name, result in expansion.metrics.items())
    needed = {*outputs, *(value for value, _ in losses), *(value for _, terms in metrics for value, _ in terms)}
    for operation in reversed(building.operations):
        if needed.isdisjoint(operation.outputs):
            message = f"the result of `{operation.name}` is used by no output and no loss"
            raise MbcError("MBC036", message, "use it, or put it under an `if` that is not taken", operation.span)
        needed.update(operation.inputs)
    for tensor, span in expansion.inputs:
        if tensor.value not in needed:
            message = f"input `{tensor.value}` is used by no output and no loss"
            raise MbcError("MBC036", message, "use it, or remove it", span)
    return Network(
        network.name,
        expansion.inputs[0][0].type.shape[0],
        building.values,
        building.operations,
        building.states,
        tuple(tensor.value for tensor, _ in expansion.inputs),
        outputs,
        losses,
        metrics,
    )
