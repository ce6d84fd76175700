"""Types of arguments for argparse, each with a message that says what is expected."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from mbc.ir.types import Precision
from mbc.options import MODES, PEERS, TECHNIQUES, RankGpu
from mbc.units import parse_duration, parse_size


def setting(text: str) -> tuple[str, str]:
    """Return the name and the value of a setting such as `batch=64`."""
    name, equals, value = text.partition("=")
    if not (equals and name.strip() and value.strip()):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE")
    return name.strip(), value.strip()


def size(text: str) -> int:
    """Return a size such as `8GB` in bytes."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def duration(text: str) -> float:
    """Return a duration such as `5min` in seconds."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """Return a whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def shared_by(text: str) -> int | tuple[RankGpu, ...]:
    """Return a number of GPUs, or GPUs by name and memory such as `h200,h100:40GB`."""
    if text.lstrip("+-").isdecimal():
        return count(text)
    gpus: list[RankGpu] = []
    for one in text.split(","):
        name, colon, memory = one.strip().partition(":")
        if not name or name.isdecimal() or (colon and not memory):
            raise argparse.ArgumentTypeError(f"'{text}' is neither a number of GPUs nor names such as h200,h100:40GB")
        gpus.append(RankGpu(name, size(memory) if colon else None))
    if len(gpus) == 1:
        raise argparse.ArgumentTypeError(f"'{text}' is one GPU: --gpu {gpus[0].gpu} plans for it")
    return tuple(gpus)


def numbers(text: str) -> tuple[float, ...]:
    """Return a comma-separated list of numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no list of numbers, such as 30,60,80") from None


def network(text: str) -> float:
    """Return the rate of a network in Gb/s: `400Gb`, `100GbE`, or `2x200Gb` for two adapters of a machine."""
    match = re.fullmatch(r"(?:(\d{1,2})x)?(\d{1,5}(?:\.\d+)?)Gb(?:E|it|/s|it/s)?", text.strip(), re.ASCII)
    rate = 0.0 if match is None else int(match[1] or 1) * float(match[2])
    if rate <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is no rate of a network such as 400Gb, 100GbE or 2x200Gb")
    return rate


def points(text: str) -> int:
    """Return a whole number above 1."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 1")
    return int(text)


def tolerance(text: str) -> float:
    """Return a number of at least 0."""
    return _number(text, lambda value: 0 <= value < math.inf, "a number of at least 0, such as 1e-5")


def share(text: str) -> float:
    """Return a number above 0 and at most 1."""
    return _number(text, lambda value: 0 < value <= 1, "a share above 0 and at most 1, such as 0.1")


def positive(text: str) -> float:
    """Return a number above 0."""
    return _number(text, lambda value: 0 < value < math.inf, "a number above 0")


def _number(text: str, holds: Callable[[float], bool], wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not holds(value):
        raise argparse.ArgumentTypeError(f"'{text}' is not {wanted}")
    return value


def target(text: str) -> tuple[str, float]:
    """Return the metric and the value of a target such as `accuracy=0.97`."""
    name, _, value = (part.strip() for part in text.partition("="))
    try:
        wanted = float(value)
    except ValueError:
        wanted = math.nan
    if not name or not math.isfinite(wanted):
        raise argparse.ArgumentTypeError(f"'{text}' is no target such as accuracy=0.97 or loss=0.1")
    return name, wanted


def seed(text: str) -> int:
    """Return a whole number from 0 to 2^63 - 1."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0 to 2^63 - 1")
    return int(text)


def blocks(text: str) -> int:
    """Return a whole number of at least 2, which a median and its spread need."""
    number = count(text)
    if number < 2:
        raise argparse.ArgumentTypeError("a median and its spread take at least 2 blocks")
    return number


@dataclass(frozen=True, slots=True, eq=False)  # argparse looks types up
class SomeOf:
    """The type of a comma-separated list of allowed words, which are kept once each and in the order given."""

    words: tuple[str, ...]

    def __call__(self, text: str) -> tuple[str, ...]:
        """Return the words of a list; raise an argument error for a word that is not allowed."""
        asked = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
        wrong = [part for part in asked if part not in self.words]
        if wrong:
            raise argparse.ArgumentTypeError(f"'{wrong[0]}' is none of {', '.join(self.words)}")
        return asked


peers = SomeOf(PEERS)
modes = SomeOf(MODES)
techniques = SomeOf(TECHNIQUES)
precisions = SomeOf(tuple(p for p in Precision if p.runs_on_gpus))
spatial_axes = SomeOf(("0", "1", "2"))
