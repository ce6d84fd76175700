"""Errors of a text, and the networks that it expands to."""

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
    """The result of checking a source.

    A network with a parameter without default is not expanded, because only `--set` gives its value.

    Attributes:
        source: Source.
        errors: First error of each network, equal ones once.
        networks: Networks without an error.
    """

    source: Source
    errors: tuple[MbcError, ...]
    networks: tuple[Lowered, ...]


@lru_cache(maxsize=KEPT_TEXTS)
def analyse(source: Source) -> Analysis:
    """Check a source, and expand its networks with the defaults of their parameters."""
    try:
        program = parse(source)
    except MbcError as error:
        return Analysis(source, (error,), ())
    errors: dict[str, MbcError] = {}
    networks: list[Lowered] = []
    for network in program.networks or (None,):
        try:
            lowered = _expanded(program, network)
        except MbcError as error:
            errors.setdefault(str(error), error)
        else:
            networks += [lowered] if lowered is not None else []
    return Analysis(source, tuple(errors.values()), tuple(networks))


def _expanded(program: ast.Program, network: ast.Network | None) -> Lowered | None:
    name = None if network is None else network.name
    if network is not None and any(parameter.default is None for parameter in network.parameters):
        choose_network(program, name)
        return None
    return lower(program, (), name)
