"""Mistakes of a text, and the networks that it expands to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mbc.errors import MbcError
from mbc.frontend import ast
from mbc.frontend.lower import Lowered, choose_network, lower
from mbc.frontend.parse import parse
from mbc.source import Source

KEPT_TEXTS = 16


@dataclass(frozen=True, slots=True)
class Analysis:
    """`errors`: the first mistake of each network, each once; `networks`: those without one. A network with a parameter
    that has no default is not expanded: only `--set` says what it is."""

    source: Source
    errors: tuple[MbcError, ...]
    networks: tuple[Lowered, ...]


@lru_cache(maxsize=KEPT_TEXTS)
def analyse(source: Source) -> Analysis:
    """What is wrong in a source, and what it expands to with the defaults of its parameters."""
    try:
        program = parse(source)
    except MbcError as error:
        return Analysis(source, (error,), ())
    found: dict[str, MbcError] = {}
    networks: list[Lowered] = []
    for network in program.networks or (None,):
        try:
            lowered = _expanded(program, network)
        except MbcError as error:
            found.setdefault(str(error), error)
        else:
            networks += [lowered] if lowered is not None else []
    return Analysis(source, tuple(found.values()), tuple(networks))


def _expanded(program: ast.Program, network: ast.Network | None) -> Lowered | None:
    name = None if network is None else network.name
    if network is not None and any(parameter.default is None for parameter in network.parameters):
        choose_network(program, name)
        return None
    return lower(program, (), name)
