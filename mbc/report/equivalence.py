"""The output of `mbc check`: the divided step of a network against the undivided one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mbc.equivalence.operations import OperationComparison
from mbc.equivalence.rule import Comparison, Reference
from mbc.plan.summary import OperationSummary
from mbc.report.columns import Column, render
from mbc.report.tables import micro_batches

_DIVISIONS = (Column("micro-batches"), Column("operations", right=True), Column("kinds", shrinks=True, least=20))
_OPERATIONS = (
    Column("operation", shrinks=True, least=18),
    Column("micro-batches", shrinks=True),
    Column("algorithm", optional=1),
    Column("distance", right=True),
    Column("allowed", right=True),
    Column(""),
)
_OWN = {
    Reference.FLOAT64: (Column("error", right=True), Column("undivided's", right=True), Column("allowed", right=True)),
    Reference.PERTURBED: (Column("perturbed", right=True), Column("allowed", right=True)),
    Reference.NONE: (Column("allowed", right=True),),
}
_EXPLAINED = {
    Reference.FLOAT64: "error: distance of the divided step from float64; undivided's: distance of the undivided step",
    Reference.PERTURBED: "perturbed: change of the undivided step when its weights have the rounding error of a call",
    Reference.NONE: "allowed: as given by --tolerance",
}


def divisions_text(divided: Sequence[OperationSummary], width: int | None = None) -> str:
    """Format a table with a row for each division, the most frequent first."""
    groups: dict[str, list[str]] = {}
    for summary in divided:
        groups.setdefault(micro_batches(summary.micro_batches), []).append(summary.kind)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    rows = [(division, str(len(kinds)), ", ".join(sorted(set(kinds)))) for division, kinds in ordered]
    return render(_DIVISIONS, rows, width)


def step_text(
    comparisons: Sequence[Comparison], reference: Reference, width: int | None = None, limit: int | None = None
) -> str:
    """Format a table of the first `limit` tensors, in the given order."""
    columns = (Column("tensor", shrinks=True, least=16), Column("of", optional=1), Column("distance", right=True))
    shown = comparisons if limit is None else comparisons[:limit]
    rows = [(c.name, str(c.part), number(c.distance), *_own(c, reference), _verdict(c)) for c in shown]
    text = render((*columns, *_OWN[reference], Column("")), rows, width)
    if len(shown) < len(comparisons):
        text += f"\n… and {len(comparisons) - len(shown)} tensors that are further from their limits"
    return f"{text}\n{_EXPLAINED[reference]}"


def _own(comparison: Comparison, reference: Reference) -> tuple[str, ...]:
    figures = {
        Reference.FLOAT64: (comparison.error, comparison.yardstick),
        Reference.PERTURBED: (comparison.yardstick,),
        Reference.NONE: (),
    }[reference]
    return (*map(number, figures), number(comparison.limit) if comparison.is_conclusive else "-")


def _verdict(comparison: Comparison) -> str:
    return ("ok" if comparison.passed else "FAILS") if comparison.is_conclusive else "rounding"


def operations_text(
    comparisons: Sequence[OperationComparison], width: int | None = None, limit: int | None = None
) -> str:
    """Format a table of the first `limit` distinct divided operations, in the given order."""
    shown = comparisons if limit is None else comparisons[:limit]
    rows = [
        (
            _title(c),
            micro_batches(divided_rows(c)),
            "same" if c.pair.same_algorithm else "may differ",
            "-" if c.distance is None else number(c.distance),
            number(c.tolerance),
            "does not fit" if c.distance is None else "ok" if c.passed else "FAILS",
        )
        for c in shown
    ]
    text = render(_OPERATIONS, rows, width)
    if len(shown) < len(comparisons):
        text += f"\n… and {len(comparisons) - len(shown)} operations that are further from their limits"
    return text


def divided_rows(comparison: OperationComparison) -> tuple[int, ...]:
    """Return the rows of each call of the divided operation."""
    pair = comparison.pair
    per_sample = pair.per_sample.index(True)
    return tuple(call.rows[per_sample].count for call in pair.divided)


def _title(comparison: OperationComparison) -> str:
    names = comparison.pair.names
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} alike"


def number(figure: float) -> str:
    """Format a distance."""
    return "0" if figure == 0 else f"{figure:.1e}"


def step_document(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Return the tensors for scripts; infinite numbers are null, because JSON has none."""
    return [
        {
            "name": c.name,
            "part": str(c.part),
            "distance": _finite(c.distance),
            "error": _finite(c.error),
            "undivided_error": _finite(c.yardstick),
            "limit": _finite(c.limit),
            "known": c.is_conclusive,
            "passed": c.passed,
        }
        for c in comparisons
    ]


def operations_document(comparisons: Sequence[OperationComparison]) -> list[dict[str, Any]]:
    """Return the operations for scripts."""
    return [
        {
            "names": list(c.pair.names),
            "kind": c.pair.request.kind,
            "micro_batches": list(divided_rows(c)),
            "same_algorithm": c.pair.same_algorithm,
            "distance": None if c.distance is None else _finite(c.distance),
            "tolerance": c.tolerance,
            "passed": c.passed,
        }
        for c in comparisons
    ]


def _finite(figure: float) -> float | None:
    return figure if abs(figure) < float("inf") else None
