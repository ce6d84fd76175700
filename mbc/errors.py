"""Errors a user can act on: a code, a place, a reason and a remedy. Codes are explained in `docs/errors.md`."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.source import Span, visible

OTHER_RANK_FAILED = 3  # the exit code of RankFailed


@dataclass
class MbcError(Exception):
    """What went wrong, where, and what to do about it.

    `code` is unique to one kind of mistake (`MBC012`); `remedy` is an imperative sentence. As text, it holds nothing
    that a terminal acts on, whoever wrote the names in it.
    """

    code: str
    message: str
    remedy: str = ""
    span: Span | None = None

    def __str__(self) -> str:
        lines = [f"error {self.code}: {self.message}"]
        if self.span is not None:
            lines.append(self.span.render())
        if self.remedy:
            lines.append(f"help: {self.remedy}")
        return visible("\n".join(lines))


@dataclass
class BudgetError(MbcError):
    """The budget is too small. `needed_bytes`, overhead included, takes the smallest plan that was found, or the bound
    of all plans where none was tried; no plan takes less than `floor_bytes`. `at_any_batch`: what is reserved for the
    GPU's context and libraries alone does not fit."""

    needed_bytes: int = 0
    floor_bytes: int = 0
    at_any_batch: bool = False


@dataclass
class LayerError(MbcError):
    """A layer does not take its tensors or settings."""


class RankFailed(MbcError):
    """Another process of the same training failed: its own message says more than this one."""
