"""What `mbc bench` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mbc.bench.contender_messages import MBC
from mbc.bench.race import Entry, Race
from mbc.optimize.bounds.measured_floor import Floor
from mbc.plan.model import Plan
from mbc.report.columns import Column, render
from mbc.units import show_size

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


_OVER = 5  # columns up to "over mbc"
_OF_SEVERAL = (Column("one GPU", right=True), Column("efficiency", right=True))


def bench_text(plan: Plan, found: Race, floor: Floor | None, width: int) -> str:
    """Everybody, then each peer's best against mbc, then mbc against its prediction and the network's floor. On several
    GPUs each contender's step on one of them, with its rows alone, and its efficiency as well."""
    graph, ours = plan.graph, found.ours
    turns = "one turn only" if found.drift is None else f"two turns, {found.drift:+.1%} apart"
    batch = found.batch or graph.batch
    rows = [_row(MBC, ours, batch, ours.step_ms, "", turns)]
    for entry in found.entries:
        if entry.result.problem:
            rows.append((entry.contender.name, *("-",) * 7, entry.result.problem))
        else:
            apart = f"{entry.apart:.1e}" if entry.apart is not None else "-"
            rows.append(_row(entry.contender.name, entry.result, batch, ours.step_ms, apart, _remark(entry, found)))
    columns, where = _COLUMNS, ""
    if found.gpus > 1:
        columns, where = (*_COLUMNS[:_OVER], *_OF_SEVERAL, *_COLUMNS[_OVER:]), f", {found.gpus} GPUs"
        rows = [
            (*row[:_OVER], *_shared(found, entry), *row[_OVER:])
            for row, entry in zip(rows, (None, *found.entries), strict=True)
        ]
    lines = [
        f"{graph.name}: a training step, batch {batch}, {graph.precision}{where}",
        "",
        render(columns, rows, width),
    ]
    lines += ["", *_verdicts(plan, found, floor)]
    return "\n".join(lines)


def bench_document(plan: Plan, found: Race, floor: Floor | None, plan_seconds: float) -> dict[str, Any]:
    """The same for a script."""
    ours = found.ours
    return {
        "network": plan.graph.name,
        "batch": found.batch or plan.graph.batch,
        "gpus": found.gpus,
        "precision": str(plan.graph.precision),
        "planned_for": plan.target.gpu,
        "profile": plan.target.profile,
        "predicted_ms": plan.predictions.train_us / 1e3,
        "measured_share": plan.predictions.measured_share,
        "plan_s": plan_seconds,
        "floor": None if floor is None else {**asdict(floor), "total_us": floor.total_us},
        "over_floor": None if floor is None else ours.step_ms * 1e3 / floor.total_us,
        "mbc": {**asdict(ours), **_alone(found, None)},
        "drift": found.drift,
        "tolerance": found.tolerance,
        "same_mathematics": found.fair,
        "best": {
            peer: None if best is None else {"variant": best.contender.variant, "ratio": _ratio(best, found)}
            for peer, best in _bests(found).items()
        },
        "contenders": [
            {
                **asdict(entry.contender),
                **asdict(entry.result),
                "apart": entry.apart,
                "same": entry.same,
                **_alone(found, entry),
            }
            for entry in found.entries
        ],
    }


def _row(name: str, result: Any, batch: int, ours_ms: float, apart: str, remark: str) -> tuple[str, ...]:
    return (
        name,
        _show_ms(result.step_ms),
        _show_ms(result.spread_ms),
        f"{batch * 1e3 / result.step_ms:,.0f}",
        f"{result.step_ms / ours_ms:.2f}x",
        show_size(result.peak_bytes) if result.peak_bytes else "-",
        f"{result.first_step_s:.1f} s",
        apart,
        remark,
    )


def _shared(found: Race, entry: Entry | None) -> tuple[str, str]:
    """The step of one GPU by itself, and the efficiency of all; of mbc, where there is no entry."""
    alone = found.ours_alone if entry is None else entry.alone
    efficiency = found.efficiency(entry)
    if alone is None or efficiency is None:
        return "-", "-"
    return _show_ms(alone.step_ms), f"{efficiency:.1%}"


def _alone(found: Race, entry: Entry | None) -> dict[str, Any]:
    if found.gpus == 1:
        return {}
    alone = found.ours_alone if entry is None else entry.alone
    return {"alone": None if alone is None else asdict(alone), "efficiency": found.efficiency(entry)}


def _remark(entry: Entry, found: Race) -> str:
    if not entry.same:
        return f"NOT THE SAME: losses {_show(entry.result.losses)}, mbc's {_show(found.ours.losses)}"
    return "; ".join(filter(None, (entry.result.stage, entry.result.unchecked)))


def _show(losses: tuple[float, ...]) -> str:
    return ", ".join(f"{loss:.5g}" for loss in losses)


def _bests(found: Race) -> dict[str, Entry | None]:
    return {peer: found.best(peer) for peer in dict.fromkeys(entry.contender.peer for entry in found.entries)}


def _ratio(best: Entry, found: Race) -> float:
    return best.result.step_ms / found.ours.step_ms


def _verdicts(plan: Plan, found: Race, floor: Floor | None) -> list[str]:
    lines: list[str] = []
    for peer, best in _bests(found).items():
        if best is None:
            lines.append(f"against {peer}: nothing to compare with")
        else:
            ratio, variant = _ratio(best, found), best.contender.variant
            lines.append(f"against {peer}: {ratio:.2f}x as fast as its best setting ({variant})")
    if found.gpus > 1:
        each = ", ".join(map(_show_ms, found.ours_alone.each_ms)) if found.ours_alone is not None else ""
        lines.append(
            f"efficiency: a step of the slowest GPU with its rows alone{f' (mbc: {each})' if each else ''}, over that "
            f"of {found.gpus} with all rows"
        )
    predicted_ms = plan.predictions.train_us / 1e3
    if floor is not None:
        over = found.ours.step_ms * 1e3 / floor.total_us
        lines.append(f"mbc: {over:.2f}x the network's floor of {_show_ms(floor.total_us / 1e3)}")
        lines.append(f"mbc: {found.ours.step_ms / predicted_ms:.2f}x the predicted {_show_ms(predicted_ms)}")
    where = "in blocks" if found.gpus == 1 else "on the slowest GPU"
    lines.append(
        f"a step: the median of {found.ours.steps} steps of mbc {where}; losses may be {found.tolerance:g} apart"
    )
    return lines


def _show_ms(time_ms: float) -> str:
    return f"{time_ms:.3g} ms" if time_ms < 100 else f"{time_ms:,.0f} ms"
