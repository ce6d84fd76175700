"""The command `mbc compile`."""

from __future__ import annotations

import argparse
import json
import keyword
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mbc.cli.arguments.shared import measuring_options
from mbc.cli.subject import read_source
from mbc.cli.terminal import notes
from mbc.hardware.part import split_name
from mbc.hardware.streams import Stream
from mbc.optimize.schedule.step_time import accumulate_us, step_us
from mbc.plan.prefetch import prefetch_bytes
from mbc.plan.summary import emulated_share
from mbc.progress import busy
from mbc.report.collectives import collectives_document, collectives_lines, ranks_text
from mbc.report.devices import host_sharing_text, library_launches, posing_text
from mbc.report.tables import NOT_PREFETCHED, batch_text, profile_of, time_cell
from mbc.stages import Stages
from mbc.units import show_given, show_range, show_size, show_time

if TYPE_CHECKING:
    from mbc.compiler import Compilation
    from mbc.plan.model import Plan


MOSTLY_MEASURED = 0.5  # share of a step from which the advice to measure the rest is left out


def run(arguments: argparse.Namespace) -> int:
    """Plan a source, write and build its package, and print the decisions."""
    from mbc.compiler import compile_source

    source = read_source(arguments.source)
    asked = measuring_options(arguments)
    output = None if arguments.output is None else Path(arguments.output)
    with notes(), busy(f"compiling {source.name}") as say:
        stages = Stages(asked.dump_stages, say)
        compilation = compile_source(source, asked, output, arguments.force, stages)
    if arguments.json:
        print(json.dumps(_figures(compilation, stages), indent=2))
        return 0
    for line in (*summary(compilation.plan), *map(_other, compilation.plans[1:])):
        print(line)
    built = compilation.package
    measured = f"measured in {stages.measuring_seconds:.1f} s, " if stages.measuring_seconds > 1.0 else ""
    verb = "written" if built.library is None else "built"
    took = f"{measured}planned in {stages.planning_seconds:.1f} s, {verb} in {stages.building_seconds:.1f} s"
    print(f"  package    {built.folder} ({took})")
    if not built.folder.name.isidentifier() or keyword.iskeyword(built.folder.name):
        print(f"             note: Python cannot import a folder called '{built.folder.name}'; name it like a variable")
    for missing in built.missing:
        print(f"  missing    {missing}")
    if built.missing:
        print("             without it the package runs on the CPU only; mbc doctor says more")
    return 0


def summary(plan: Plan) -> list[str]:
    """Return the decisions of a plan, one a line."""
    p, b = plan.predictions, plan.bounds
    graph = plan.graph
    step, inference = (
        ("~", f" ({show_range(low_us, high_us)})") if low_us < high_us else ("", "")
        for low_us, high_us in ((p.train_low_us, p.train_high_us), (p.infer_low_us, p.infer_high_us))
    )
    source_of_times = "measured" if p.measured_share >= 1 else "estimated" if p.measured_share <= 0 else (
        f"{p.measured_share:.0%} of the step measured, the rest estimated"
    )  # fmt: skip
    concurrent = sum(launch.stream is Stream.CONCURRENT for launch in plan.train.launches)
    placed = f"{p.arena_bytes / b.live_bytes - 1:.1%} above" if b.live_bytes > 0 else "no more than"
    arena = f"  arena      {show_size(p.arena_bytes)} ({placed} peak live bytes, {show_size(b.live_bytes)})"
    overhead = "measured" if p.overhead_measured else "reserved: never measured on this GPU"
    ahead_bytes = prefetch_bytes(plan)
    needed = p.arena_bytes + p.overhead_bytes + ahead_bytes
    if not plan.is_timed:
        # No GPU runs the plan, so it has no times and no budget.
        return [f"{graph.name}: {batch_text(plan)}, {graph.precision}, for the CPU", _launches(plan), arena]
    emulated, products = emulated_share(plan, plan.train)
    lines = [
        f"{graph.name}: {batch_text(plan)}, {graph.precision}, for {plan.target.gpu} ({plan.target.architecture})",
        f"  step       {step[0]}{show_time(p.train_us)}{step[1]}",
        *_accumulated(plan),
        f"  times      {source_of_times}",
        *_how_to_measure(plan),
        *_against_bounds(plan),
        f"  inference  {inference[0]}{show_time(p.infer_us)}{inference[1]}",
        _launches(plan, concurrent),
        *collectives_lines(plan),
        *([f"  emulated   {emulated} of {products} convolutions and linear layers in fp32"] if emulated else []),
        *([f"  posing     {posing}"] if (posing := posing_text(plan)) else []),
        f"  profile    {profile_of(plan)}",
        arena,
        f"  least      {show_size(b.floor_bytes)} (lower bound of the arena, set by {b.floor_operation})",
        f"  overhead   {show_size(p.overhead_bytes)} ({overhead})",
        f"  prefetch   {show_size(ahead_bytes)}, where inputs of the next step arrive while this one runs"
        if ahead_bytes
        else f"  prefetch   {NOT_PREFETCHED}",
        f"  budget     {show_given(plan.budget_bytes)}, of which {show_size(needed)} is taken "
        f"({needed / plan.budget_bytes:.1%})",
    ]
    if p.host_bytes:
        most = "" if plan.host_limit_bytes is None else f", of at most {show_given(plan.host_limit_bytes)}"
        lines.append(f"  host       {show_size(p.host_bytes)} of pinned memory{most}")
    if shared := host_sharing_text(plan):
        lines.append(f"  shared     {shared} ({show_time(p.oblivious_us)})")
    if p.peer_bytes:
        most = show_given(plan.peer_limit_bytes)
        lines.append(f"  peers      {show_size(p.peer_bytes)} of another GPU's memory, of at most {most}")
    return lines


def _accumulated(plan: Plan) -> list[str]:
    """Return the line on gradient accumulation: the predicted time is that of the last of several mini-batches."""
    count = plan.graph.optimizer.accumulate
    if count == 1:
        return []
    each, whole = (show_time(us) for us in (accumulate_us(plan), step_us(plan)))
    earlier = "1 mini-batch" if count == 2 else f"{count - 1} mini-batches"
    return [f"  accumulate {earlier} of {each} before it: {whole} a step"]


def _how_to_measure(plan: Plan) -> list[str]:
    """Return the line that says how to measure a step of which most is estimated; no line for other steps."""
    if plan.predictions.measured_share >= MOSTLY_MEASURED:
        return []
    rows = "" if plan.graph.ranks is None else f" --set batch={plan.graph.batch}"
    pose = split_name(plan.target.gpu).pose
    gpu = f" --gpu auto@{pose}" if pose else ""
    unmeasured = "the rest" if plan.predictions.measured_share > 0 else "its operations"
    return [f"             mbc profile NET{rows}{gpu} measures {unmeasured} where there is such a GPU"]


def _other(plan: Plan) -> str:
    """Return the line for ranks that have another number of rows than the first rank, or another GPU."""
    p, ranks = plan.predictions, plan.graph.ranks
    members = ranks_text(() if ranks is None else ranks.members)
    rows = f"{plan.graph.batch} row{'' if plan.graph.batch == 1 else 's'} on {plan.target.gpu}"
    figures = f"step {time_cell(p.train_us, True)} ({p.measured_share:.0%} measured), arena {show_size(p.arena_bytes)}"
    return f"  {members}: {rows}, {figures}"


def _launches(plan: Plan, concurrent: int = 0) -> str:
    """Return the line on launches; `concurrent` of the step's launches run on the concurrent stream."""
    where = f", {concurrent} of them on the concurrent stream" if concurrent else ""
    return f"  launches   {len(plan.train.launches)} of the step{where}; {len(plan.infer.launches)} of inference"


def _against_bounds(plan: Plan) -> list[str]:
    """Compare the step with each bound of its time, one a line."""
    step_us, bounds = plan.predictions.train_us, plan.bounds
    lines: list[str] = []
    if bounds.least_us > 0:
        serial = "lower bound of serial schedules"
        within = f"{serial} within the budget" if bounds.within_budget_us > bounds.fastest_us else serial
        name = "critical-path lower bound" if bounds.critical_path_us > 0 else within
        lines.append(f"  bound      {_compared(step_us, bounds.least_us, 'above', 'below', 'at')} the {name}")
    if bounds.fastest_us > 0:
        compared = _compared(step_us, bounds.fastest_us, "slower than", "faster than", "as fast as")
        lines.append(f"  serial     {compared} the best serial schedule")
    if bounds.nondeterministic_us > 0:
        slower = step_us / bounds.nondeterministic_us - 1
        lines.append(f"  same bits  {slower:+.1%} for deterministic = true")
    return lines


def _compared(time_us: float, other_us: float, longer: str, shorter: str, equal: str) -> str:
    """Say by how much a time exceeds another one, or falls below it."""
    excess = time_us / other_us - 1
    return equal if abs(excess) < 0.0005 else f"{abs(excess):.1%} {shorter if excess < 0 else longer}"


def _figures(compilation: Compilation, stages: Stages) -> dict[str, Any]:
    plan, built = compilation.plan, compilation.package
    return {
        "network": plan.graph.name,
        "batch": plan.graph.global_batch,
        "precision": str(plan.graph.precision),
        "gpu": plan.target.gpu,
        "architecture": plan.target.architecture,
        "own_architecture": plan.target.device.own_architecture,
        "library_launches": library_launches(plan),
        "profile": plan.target.profile,
        **asdict(plan.predictions),
        **asdict(plan.bounds),
        "step_us": step_us(plan),
        "train_launches": len(plan.train.launches),
        "infer_launches": len(plan.infer.launches),
        "emulated_fp32_operations": emulated_share(plan, plan.train)[0],
        "prefetch_bytes": prefetch_bytes(plan),
        "budget_bytes": plan.budget_bytes,
        "host_limit_bytes": plan.host_limit_bytes,
        "peer_limit_bytes": plan.peer_limit_bytes,
        "collectives": collectives_document(plan),
        "other_ranks": [
            {
                "members": [] if other.graph.ranks is None else list(other.graph.ranks.members),
                "gpu": other.target.gpu,
                "batch": other.graph.batch,
                "train_us": other.predictions.train_us,
                "measured_share": other.predictions.measured_share,
                "arena_bytes": other.predictions.arena_bytes,
            }
            for other in compilation.plans[1:]
        ],
        "package": str(built.folder),
        "library": None if built.library is None else str(built.library),
        "missing": [
            {"name": missing.name, "purpose": missing.purpose, "remedy": missing.remedy} for missing in built.missing
        ],
        "measure_seconds": round(stages.measuring_seconds, 3),
        "plan_seconds": round(stages.planning_seconds, 3),
        "build_seconds": round(stages.building_seconds, 3),
        "stage_seconds": {name: round(took, 3) for name, took in stages.seconds.items()},
    }
