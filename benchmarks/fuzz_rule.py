"""The rule by which every input is judged: mbc accepts the input, or refuses it with an error of its own."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from record import ROOT

from mbc.errors import MbcError

CORPUS = ROOT / "tests" / "fuzz" / "corpus"
SETTLED = frozenset("\n\t")  # what of control characters a message may have


class Wrong(Exception):
    """An answer that breaks the rule: a message with control characters, or a bug reported by mbc."""


@dataclass(frozen=True)
class Target:
    """One kind of hostile input.

    Attributes:
        judge: Reads the bytes, in a folder that it may write to. An MbcError is a valid answer, any other exception
            a finding.
        seeds: Returns the inputs to start from, in addition to those of CORPUS.
        share: Share of all inputs.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    change: Callable[[bytes, random.Random], bytes]
    judge: Callable[[bytes, Path], str]
    share: float


def answer(target: Target, data: bytes, folder: Path) -> str:
    """Return `taken`, or the code of the error that refuses the input.

    Every other exception is raised; an error that breaks the rule raises `Wrong`.
    """
    try:
        return target.judge(data, folder)
    except MbcError as error:
        text = str(error)
        check_text(text)
        if not (re.fullmatch(r"MBC\d{3}", error.code) and error.message and error.remedy):
            raise Wrong(f"an error without code, message or remedy: {text!r}") from error
        if _of_memory(error):
            raise Wrong(f"refused for want of memory: {text!r}") from error
        return error.code


def check_text(text: str) -> None:
    """Raise `Wrong` if a text has characters that could change other text of a terminal."""
    hidden = sorted({c for c in text if not c.isprintable() and c not in SETTLED})
    if hidden:
        raise Wrong(f"a message with {hidden!r}")


def _of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def corpus(target: Target) -> list[bytes]:
    """Return the committed inputs of a target: earlier findings, and inputs that reached unusual code."""
    return [path.read_bytes() for path in sorted((CORPUS / target.name).glob("*"))]
