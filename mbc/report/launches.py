"""The output of `mbc check --launches`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mbc.equivalence.deviation import MOST_ELEMENT_ROUNDOFFS, MOST_ROUNDOFFS, Deviation
from mbc.equivalence.launches import Checked, LaunchResult
from mbc.report.columns import Column, render

_MEASURES = (
    Column("roundoffs", right=True),
    Column("worst element", right=True),
    Column("wrong", right=True),
    Column(""),
)
_KINDS = (Column("kind", shrinks=True, least=24), Column("launches", right=True), *_MEASURES)
_LAUNCHES = (
    Column("launch", right=True),
    Column("operations", shrinks=True, least=18),
    Column("kernel", shrinks=True, least=12, optional=1),
    Column("output", shrinks=True, least=12),
    *_MEASURES,
)


def kinds_text(checked: Checked, width: int | None = None) -> str:
    """Format a table with the worst measures of each kind of launch, the worst kind first."""
    kinds: dict[str, list[LaunchResult]] = {}
    for launch in checked.worst:
        kinds.setdefault(launch.kind, []).append(launch)
    rows = [(kind, str(len(launches)), *_worst_of(launches)) for kind, launches in kinds.items()]
    return render(_KINDS, rows, width)


def launches_text(checked: Checked, limit: int, width: int | None = None) -> str:
    """Format a table of the worst launches and their worst outputs; all launches that fail are included."""
    failing = sum(not launch.passed for launch in checked.launches)
    shown = checked.worst[: max(limit, failing)]
    rows = [
        (
            f"{launch.program} {launch.index}",
            _named(launch),
            launch.kernel,
            output.value,
            *_measures(output.roundoffs, output.element, output.wrong, output.passed),
        )
        for launch in shown
        if launch.outputs
        for output in _shown(launch)
    ]
    limits = (
        f"allowed: {MOST_ROUNDOFFS:.0f} roundoffs of an output in L2, {MOST_ELEMENT_ROUNDOFFS:.0f} of an element,"
        " no wrong choice beyond rounding"
    )
    return f"{render(_LAUNCHES, rows, width)}\n{limits}"


def verdict(checked: Checked) -> str:
    """Return the verdict in one line."""
    count, failing = len(checked.launches), sum(not launch.passed for launch in checked.launches)
    if failing:
        return f"{failing} of {count} launches do not give the result of {checked.reference}"
    elements = sum(output.elements for launch in checked.launches for output in launch.outputs)
    return f"all {count} launches give the result of {checked.reference}, in all {elements:,} elements of their outputs"


def document(checked: Checked) -> dict[str, Any]:
    """Return all results for scripts; infinite numbers are null."""
    return {
        "device": checked.device,
        "reference": checked.reference,
        "loss": _finite(checked.loss),
        "launches": [
            {
                "program": launch.program,
                "launch": launch.index,
                "operations": launch.name,
                "kind": launch.kind,
                "kernel": launch.kernel,
                "rows": list(launch.rows),
                "passed": launch.passed,
                "outputs": [_output(output) for output in launch.outputs],
            }
            for launch in checked.launches
        ],
    }


def _output(output: Deviation) -> dict[str, Any]:
    return {
        "value": output.value,
        "dtype": str(output.dtype),
        "elements": output.elements,
        "roundoffs": _finite(output.roundoffs),
        "worst_element": _finite(output.element),
        "wrong": output.wrong,
        "differing": output.differing,
        "distance": _finite(output.relative),
        "passed": output.passed,
    }


def _shown(launch: LaunchResult) -> tuple[Deviation, ...]:
    """Return the outputs that fail, else the worst output."""
    failing = tuple(output for output in launch.outputs if not output.passed)
    return failing or (max(launch.outputs, key=lambda output: output.badness),)


def _named(launch: LaunchResult) -> str:
    start, stop = launch.rows
    return f"{launch.name} [{start}:{stop}]" if start or launch.divided else launch.name


def _worst_of(launches: Sequence[LaunchResult]) -> tuple[str, ...]:
    outputs = [output for launch in launches for output in launch.outputs]
    return _measures(
        max((output.roundoffs for output in outputs), default=0.0),
        max((output.element for output in outputs), default=0.0),
        sum(output.wrong for output in outputs),
        all(output.passed for output in outputs),
    )


def _measures(roundoffs: float, element: float, wrong: int, passed: bool) -> tuple[str, ...]:
    return f"{roundoffs:.2f}", f"{element:.1f}", str(wrong), "ok" if passed else "FAILS"


def _finite(figure: float) -> float | None:
    return figure if abs(figure) < float("inf") else None
