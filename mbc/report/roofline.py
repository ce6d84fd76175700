"""The output of `mbc show --roofline`: each operation against its limit, and the step against the network's floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mbc.analysis.roofline import Bound, Ceilings, Limit, ceilings_of, limits
from mbc.hardware.streams import COPY_STREAMS
from mbc.kernels.cuda.fp32_emulated.fp32_emulated_conv import PRODUCTS
from mbc.optimize.bounds.measured_floor import BANDWIDTH_SHARE, Floor
from mbc.plan.model import Plan, Program
from mbc.report.columns import Column, render
from mbc.report.tables import heading, kernels_cell, time_cell
from mbc.units import show_rate, show_size, show_time

_OPERATIONS = (
    Column("operation", shrinks=True, least=18),
    Column("kind", shrinks=True, least=12, optional=2),
    Column("kernel", shrinks=True, least=16, optional=1),
    Column("bytes", right=True),
    Column("flops", right=True),
    Column("limit", right=True),
    Column("nearest limit"),
    Column("time", right=True),
    Column("time / limit", right=True),
    Column("lost", right=True),
)
_KINDS = (
    Column("kind", shrinks=True, least=12),
    Column("operations", right=True),
    Column("bytes", right=True),
    Column("flops", right=True),
    Column("limit", right=True),
    Column("nearest limit"),
    Column("time", right=True),
    Column("time / limit", right=True),
    Column("lost", right=True),
    Column("share of loss", right=True),
)


def roofline_text(
    plan: Plan, floor: Floor | None, *, width: int, limit: int | None = None, by_kind: bool = False, infer: bool = False
) -> str:
    """Format ceilings, operations (unless `by_kind`), kinds, and totals.

    Args:
        plan: Plan.
        floor: Floor of the training step; None to leave it out.
        width: Columns of the terminal.
        limit: Largest number of operations to list, those that lose most, in program order; None for all.
        by_kind: Whether to leave out single operations.
        infer: Whether to show the inference program instead of the training step.

    Raises:
        MbcError: MBC196, the plan is in fp64.
    """
    program = plan.infer if infer else plan.train
    ceilings = ceilings_of(plan)
    operations = limits(plan, program, ceilings)
    parts = [f"{heading(plan, infer)}\n{_ceilings_text(plan, ceilings)}"]
    if not by_kind:
        parts.append(_operations_table(operations, width, limit))
    parts += [_kinds_table(operations, width), _totals_text(program, operations, ceilings, floor)]
    return "\n\n".join(parts)


def roofline_document(plan: Plan, floor: Floor | None, *, infer: bool = False) -> dict[str, Any]:
    """Return the operations for scripts: sizes in bytes, times in µs."""
    program = plan.infer if infer else plan.train
    ceilings = ceilings_of(plan)
    operations = limits(plan, program, ceilings)
    return {
        "network": plan.graph.name,
        "batch": plan.graph.global_batch,
        "precision": str(plan.graph.precision),
        "program": "infer" if infer else "train",
        "target": asdict(plan.target),
        "ceilings": asdict(ceilings),
        "time_us": sum(one.summary.time_us for one in operations),
        "limit_us": sum(one.limit_us for one in operations),
        "launches": len(program.launches),
        "floor": None if floor is None else {**asdict(floor), "total_us": floor.total_us},
        "kinds": [_group_row(kind, group) for kind, group in _by_kind(operations)],
        "operations": [{"name": one.summary.name, **_row(one)} for one in operations],
    }


def _row(one: Limit) -> dict[str, Any]:
    return {
        "kind": one.summary.kind,
        "kernels": list(one.summary.kernels),
        "bytes": one.moved_bytes,
        "flops": one.flops,
        "memory_us": one.memory_us,
        "arithmetic_us": one.arithmetic_us,
        "link_us": one.link_us,
        "limit_us": one.limit_us,
        "bound": str(one.bound),
        "time_us": one.summary.time_us,
        "estimated": one.summary.estimated,
    }


def _group_row(kind: str, group: Sequence[Limit]) -> dict[str, Any]:
    return {
        "kind": kind,
        "operations": len(group),
        "bytes": sum(one.moved_bytes for one in group),
        "flops": sum(one.flops for one in group),
        "limit_us": sum(one.limit_us for one in group),
        "time_us": sum(one.summary.time_us for one in group),
        "estimated": any(one.summary.estimated for one in group),
    }


def _by_kind(operations: Sequence[Limit]) -> list[tuple[str, list[Limit]]]:
    """Group operations by kind, the kind that loses most first."""
    groups: dict[str, list[Limit]] = {}
    for one in operations:
        groups.setdefault(one.summary.kind, []).append(one)
    return sorted(groups.items(), key=lambda item: (-sum(one.lost_us for one in item[1]), item[0]))


def _ceilings_text(plan: Plan, ceilings: Ceilings) -> str:
    source = "measured" if ceilings.measured else "from the datasheet"
    emulated = f", emulated by {PRODUCTS} fp16 tensor-core products each" if ceilings.in_halves else ""
    return (
        f"ceilings ({source}): {show_rate(ceilings.bytes_per_us / 1e3)} GB/s of copying, "
        f"{show_rate(ceilings.flops_per_us / 1e6)} TFLOP/s of {plan.graph.precision}{emulated}"
    )


def _operations_table(operations: Sequence[Limit], width: int, limit: int | None) -> str:
    shown = list(operations)
    if limit is not None and limit < len(shown):
        worst = sorted(shown, key=lambda one: (-one.lost_us, one.summary.first_launch))[:limit]
        shown = sorted(worst, key=lambda one: one.summary.first_launch)
    rows = [(one.summary.name, one.summary.kind, kernels_cell(one.summary), *_figures([one])) for one in shown]
    lines = [render(_OPERATIONS, rows, width)]
    if len(shown) < len(operations):
        lost_us = sum(one.lost_us for one in operations) - sum(one.lost_us for one in shown)
        lines.append(f"… and {len(operations) - len(shown)} operations that lose less, {_lost(lost_us)} together")
    return "\n".join(lines)


def _kinds_table(operations: Sequence[Limit], width: int) -> str:
    lost_us = sum(max(0.0, one.lost_us) for one in operations) or 1.0
    rows = [
        (
            kind,
            str(len(group)),
            *_figures(group),
            f"{100 * sum(max(0.0, one.lost_us) for one in group) / lost_us:.1f} %",
        )
        for kind, group in _by_kind(operations)
    ]
    kernels = _kernels(operations)
    rows.append(
        ("all" if len(kernels) == len(operations) else "all kernels", str(len(kernels)), *_figures(kernels), "")
    )
    return render(_KINDS, rows, width)


def _kernels(operations: Sequence[Limit]) -> list[Limit]:
    """Return all operations but copies, which run beside kernels."""
    return [one for one in operations if one.summary.stream not in COPY_STREAMS]


def _figures(group: Sequence[Limit]) -> tuple[str, ...]:
    """Return the sums of a group: bytes, flops, limit, the binding limit, time, ratio, loss."""
    flops = sum(one.flops for one in group)
    limit_us = sum(one.limit_us for one in group)
    time_us = sum(one.summary.time_us for one in group)
    return (
        show_size(sum(one.moved_bytes for one in group)),
        _show_flops(flops) if flops else "-",
        show_time(limit_us),
        _bound(group),
        time_cell(time_us, any(one.summary.estimated for one in group)),
        _ratio(time_us, limit_us),
        _lost(time_us - limit_us),
    )


def _bound(group: Sequence[Limit]) -> str:
    bounds = {one.bound for one in group}
    if len(bounds) == 1:
        return str(bounds.pop())
    if Bound.LINK in bounds:
        return " and ".join(bound for bound in Bound if bound in bounds)
    by_arithmetic = sum(one.limit_us for one in group if one.bound is Bound.ARITHMETIC)
    return f"both ({100 * by_arithmetic / sum(one.limit_us for one in group):.0f} % arithmetic)"


def _totals_text(program: Program, operations: Sequence[Limit], ceilings: Ceilings, floor: Floor | None) -> str:
    kernels = _kernels(operations)
    copies_us = sum(one.summary.time_us for one in operations) - sum(one.summary.time_us for one in kernels)
    time_us = sum(one.summary.time_us for one in kernels)
    limit_us = sum(one.limit_us for one in kernels)
    guess = any(one.summary.estimated for one in kernels)
    launches = sum(launch.stream not in COPY_STREAMS for launch in program.launches)
    beside = f"{len(program.launches) - launches} copies take {show_time(copies_us)} beside them" if copies_us else ""
    rows = [
        ("all kernels, serially", time_cell(time_us, guess), beside),
        (
            "speed of light of these operations",
            show_time(limit_us),
            f"{_ratio(time_us, limit_us)} of it taken: the sum of the limits, without further fusion",
        ),
        ("  of the difference: gaps", show_time(launches * ceilings.launch_us), f"{launches} launches"),
    ]
    if floor is not None:
        products = f"fastest known kernel of each of {floor.products} convolutions and GEMMs"
        if floor.estimated:
            products += f", {floor.estimated} of them estimated"
        rows += [
            (
                "floor of the network",
                time_cell(floor.total_us, floor.estimated > 0),
                f"{_ratio(time_us, floor.total_us)} of it taken",
            ),
            ("  convolutions and GEMMs", time_cell(floor.products_us, floor.estimated > 0), products),
            (
                "  everything else",
                show_time(floor.other_us),
                f"{show_size(floor.other_bytes)}, the fewest bytes, at {100 * BANDWIDTH_SHARE:.0f} % of copying",
            ),
        ]
    lines = [render((Column("in all"), Column("", right=True), Column("")), rows)]
    if any(one.lost_us < 0 for one in operations if one.bound is Bound.ARITHMETIC):
        lines.append("FFT and Winograd multiply less than the definition of a convolution, which the limit counts")
    return "\n".join(lines)


def _ratio(time_us: float, limit_us: float) -> str:
    if limit_us <= 0:
        return "-"
    # Even a tiny operation takes the time of a launch.
    return f"{time_us / limit_us:.2f}x" if time_us < 100 * limit_us else ">99x"


def _lost(time_us: float) -> str:
    return f"-{show_time(-time_us)}" if time_us < 0 else show_time(time_us)


def _show_flops(flops: float) -> str:
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if flops >= scale:
            value = flops / scale
            return f"{value:.{2 if value < 10 else 1}f} {unit}"
    return f"{flops / 1e3:.1f} k"
