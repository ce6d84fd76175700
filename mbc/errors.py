"""Errors that a user can act on: a code, a place, a reason and a remedy; `docs/errors.md` explains the codes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mbc.source import Span, visible

OTHER_RANK_FAILED = 3  # the exit code of RankFailed


@dataclass
class MbcError(Exception):
    """A mistake, its place, and its remedy.

    `code` identifies one kind of mistake (`MBC012`); `remedy` is an imperative sentence. The text has no characters
    that a terminal acts on, whoever wrote the names in it.
    """

    code: str
    message: str
    remedy: str = ""
    span: Span | None = None

    def __str__(self) -> str:
        """Return the message with its place and remedy."""
        lines = [f"error {self.code}: {self.message}"]
        if self.span is not None:
            lines.append(self.span.render())
        if self.remedy:
            lines.append(f"help: {self.remedy}")
        return visible("\n".join(lines))


@dataclass
class BudgetError(MbcError):
    """The budget is too small.

    Attributes:
        needed_bytes: Size of the smallest plan of the search, with overhead, or the lower bound of all plans if none
            was tried.
        floor_bytes: Lower bound of all plans.
        budget_bytes: The budget, with the overhead.
        at_any_batch: Whether the memory that is reserved for the GPU's context and libraries alone does not fit.
        is_certain: Whether `needed_bytes` and more are never refused.
        slowest_us: Time of a step above which steps were abandoned, though they may be smaller.
        half_precision: Precision in which activations take half of their bytes; empty if none would help.
    """

    needed_bytes: int = 0
    floor_bytes: int = 0
    budget_bytes: int = 0
    at_any_batch: bool = False
    is_certain: bool = False
    slowest_us: float = math.inf
    half_precision: str = ""

    @property
    def is_planned(self) -> bool:
        """True if a plan of `needed_bytes` was found; otherwise they are a lower bound."""
        return self.needed_bytes > self.floor_bytes


@dataclass
class LayerError(MbcError):
    """A layer does not accept its tensors or settings."""


class RankFailed(MbcError):
    """Another process of the same training failed; its own message has the reason."""
