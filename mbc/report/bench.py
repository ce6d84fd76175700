"""The output of `mbc bench`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mbc.bench.contender_messages import MBC
from mbc.bench.race import Entry, Race
from mbc.optimize.bounds.measured_floor import Floor
from mbc.plan.model import Plan
from mbc.report.columns import Column, render
from mbc.report.devices import library_launches
from mbc.units import show_rate, show_size

_COLUMNS = (
    Column("contender", shrinks=True, least=20),
    Column("step", right=True),
    Column("spread", right=True, optional=2),
    Column("samples/s", right=True),
    Column("over mbc", right=True),
    Column("memory", right=True),
    Column("first step", right=True, optional=1),
    Column("losses apart", right=True),
    Column("", shrinks=True, least=12),
)


_OVER = 5  # number of columns up to "over mbc"
_OF_SEVERAL = (Column("one GPU", right=True), Column("efficiency", right=True))


def bench_text(plan: Plan, race: Race, floor: Floor | None, width: int) -> str:
    """Format all contenders, the best setting of each peer against mbc, and mbc against its prediction and floor.

    On several GPUs the table also has the step of one GPU with its rows alone, and the efficiency.

    Args:
        plan: Plan of mbc.
        race: Results of all contenders.
        floor: Floor of the network's step; None if it was not computed.
        width: Columns of the terminal.
    """
    graph, ours = plan.graph, race.ours
    turns = "one turn only" if race.drift is None else f"two turns, {race.drift:+.1%} apart"
    batch = race.batch or graph.batch
    rows = [_row(MBC, ours, batch, ours.step_ms, "", turns)]
    for entry in race.entries:
        if entry.result.problem:
            rows.append((entry.contender.name, *("-",) * 7, entry.result.problem))
        else:
            apart = f"{entry.apart:.1e}" if entry.apart is not None else "-"
            rows.append(_row(entry.contender.name, entry.result, batch, ours.step_ms, apart, _remark(entry, race)))
    columns, where = _COLUMNS, ""
    if race.gpus > 1:
        columns, where = (*_COLUMNS[:_OVER], *_OF_SEVERAL, *_COLUMNS[_OVER:]), f", {race.gpus} GPUs"
        rows = [
            (*row[:_OVER], *_shared(race, entry), *row[_OVER:])
            for row, entry in zip(rows, (None, *race.entries), strict=True)
        ]
    lines = [
        f"{graph.name}: a training step, batch {batch}, {graph.precision}{where}",
        "",
        render(columns, rows, width),
    ]
    lines += ["", *_verdicts(plan, race, floor)]
    return "\n".join(lines)


def bench_document(plan: Plan, race: Race, floor: Floor | None, plan_seconds: float) -> dict[str, Any]:
    """Return all results for scripts: times in ms or, where a name says so, in µs or s, sizes in bytes."""
    ours = race.ours
    return {
        "network": plan.graph.name,
        "batch": race.batch or plan.graph.batch,
        "gpus": race.gpus,
        "precision": str(plan.graph.precision),
        "planned_for": plan.target.gpu,
        "profile": plan.target.profile,
        "library_launches": library_launches(plan),
        "predicted_ms": plan.predictions.train_us / 1e3,
        "measured_share": plan.predictions.measured_share,
        "plan_s": plan_seconds,
        "floor": None if floor is None else {**asdict(floor), "total_us": floor.total_us},
        "over_floor": None if floor is None else ours.step_ms * 1e3 / floor.total_us,
        "mbc": {**asdict(ours), **_alone(race, None)},
        "drift": race.drift,
        "tolerance": race.tolerance,
        "same_mathematics": race.fair,
        "best": {
            peer: None if best is None else {"variant": best.contender.variant, "ratio": _ratio(best, race)}
            for peer, best in _bests(race).items()
        },
        "contenders": [
            {
                **asdict(entry.contender),
                **asdict(entry.result),
                "apart": entry.apart,
                "same": entry.same,
                **_alone(race, entry),
            }
            for entry in race.entries
        ],
    }


def _row(name: str, result: Any, batch: int, ours_ms: float, apart: str, remark: str) -> tuple[str, ...]:
    return (
        name,
        _show_ms(result.step_ms),
        _show_ms(result.spread_ms),
        show_rate(batch * 1e3 / result.step_ms),
        f"{result.step_ms / ours_ms:.2f}x",
        show_size(result.peak_bytes) if result.peak_bytes else "-",
        f"{result.first_step_s:.1f} s",
        apart,
        remark,
    )


def _shared(race: Race, entry: Entry | None) -> tuple[str, str]:
    """Return the step of one GPU alone, and the efficiency of all GPUs; `entry` is None for mbc."""
    alone = race.ours_alone if entry is None else entry.alone
    efficiency = race.efficiency(entry)
    if alone is None or efficiency is None:
        return "-", "-"
    return _show_ms(alone.step_ms), f"{efficiency:.1%}"


def _alone(race: Race, entry: Entry | None) -> dict[str, Any]:
    if race.gpus == 1:
        return {}
    alone = race.ours_alone if entry is None else entry.alone
    return {"alone": None if alone is None else asdict(alone), "efficiency": race.efficiency(entry)}


def _remark(entry: Entry, race: Race) -> str:
    if not entry.same:
        return f"NOT THE SAME: losses {_show(entry.result.losses)}, mbc's {_show(race.ours.losses)}"
    return "; ".join(filter(None, (entry.result.stage, entry.result.unchecked)))


def _show(losses: tuple[float, ...]) -> str:
    return ", ".join(f"{loss:.5g}" for loss in losses)


def _bests(race: Race) -> dict[str, Entry | None]:
    return {peer: race.best(peer) for peer in dict.fromkeys(entry.contender.peer for entry in race.entries)}


def _ratio(best: Entry, race: Race) -> float:
    return best.result.step_ms / race.ours.step_ms


def _verdicts(plan: Plan, race: Race, floor: Floor | None) -> list[str]:
    lines: list[str] = []
    for peer, best in _bests(race).items():
        if best is None:
            lines.append(f"against {peer}: nothing to compare with")
        else:
            ratio, variant = _ratio(best, race), best.contender.variant
            lines.append(f"against {peer}: {ratio:.2f}x as fast as its best setting ({variant})")
    if race.gpus > 1:
        each = ", ".join(map(_show_ms, race.ours_alone.each_ms)) if race.ours_alone is not None else ""
        lines.append(
            f"efficiency: a step of the slowest GPU with its rows alone{f' (mbc: {each})' if each else ''}, over that "
            f"of {race.gpus} with all rows"
        )
    predicted_ms = plan.predictions.train_us / 1e3
    if floor is not None:
        over = race.ours.step_ms * 1e3 / floor.total_us
        lines.append(f"mbc: {over:.2f}x the network's floor of {_show_ms(floor.total_us / 1e3)}")
        lines.append(f"mbc: {race.ours.step_ms / predicted_ms:.2f}x the predicted {_show_ms(predicted_ms)}")
    where = "in blocks" if race.gpus == 1 else "on the slowest GPU"
    lines.append(
        f"a step: the median of {race.ours.steps} steps of mbc {where}; losses may be {race.tolerance:g} apart"
    )
    return lines


def _show_ms(time_ms: float) -> str:
    return f"{time_ms:.3g} ms" if time_ms < 100 else f"{time_ms:,.0f} ms"
