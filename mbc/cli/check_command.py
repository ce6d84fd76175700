"""The command `mbc check`."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mbc.cli.arguments.shared import options
from mbc.cli.check_places import built, on_gpu
from mbc.cli.subject import plan_source, read_source
from mbc.cli.terminal import output_width
from mbc.progress import busy

if TYPE_CHECKING:
    from mbc.equivalence.operations import OperationComparison
    from mbc.equivalence.rule import Comparison, Draw, Reference
    from mbc.options import Options
    from mbc.plan.model import Plan


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a comparison: a table, a one-line verdict, and a document for scripts."""

    passed: bool
    table: str
    verdict: str
    document: dict[str, Any]


def run(arguments: argparse.Namespace) -> int:
    """Plan a network divided and undivided, run both plans and compare them. Return 1 if their results differ."""
    from mbc.equivalence import step_variants as variants
    from mbc.report.equivalence import divisions_text

    if arguments.launches:
        from mbc.cli import check_launches

        return check_launches.run(arguments)
    source = read_source(arguments.source, "give its source (.mbc); --launches takes plans, too")
    asked = options(arguments)
    plan = plan_source(source, variants.divided(asked)).plan
    divided = variants.divisions(plan)
    graph = plan.graph
    head = f"{graph.name}: batch {graph.batch}, {graph.precision}"
    about: dict[str, Any] = {
        "network": graph.name, "batch": graph.batch, "precision": str(graph.precision), "divided": len(divided)
    }  # fmt: skip
    if not divided:
        if arguments.json:
            print(json.dumps({**about, "passed": True}, indent=2))
        else:
            print(f"{head}: no operation is divided, so there is nothing to compare ({_wanted(asked, graph.batch)})")
        return 0
    whole = plan_source(source, variants.undivided(asked)).plan
    gpu = on_gpu(arguments.device, plan)
    work = _operations if arguments.operations else _steps
    result = work(arguments, plan, whole, gpu)
    if arguments.json:
        print(json.dumps({**about, **result.document, "passed": result.passed}, indent=2))
    else:
        print(f"{head}, divided against undivided, on the {'GPU' if gpu else 'CPU'}\n")
        print(f"{divisions_text(divided, output_width())}\n\n{result.table}\n\n{result.verdict}")
    return 0 if result.passed else 1


def _wanted(asked: Options, batch: int) -> str:
    if asked.micro_batch:
        return f"--micro-batch {asked.micro_batch}, of {batch} rows"
    return f"policy {asked.policy}; --micro-batch or a smaller --workspace-limit divides"


def _operations(arguments: argparse.Namespace, plan: Plan, whole: Plan, on_gpu: bool) -> Result:
    """Compare each distinct divided operation with the undivided one, on random operands."""
    from mbc.equivalence.calls import pairs
    from mbc.equivalence.operations import OnCpu, OnGpu, compare_operation
    from mbc.report.equivalence import operations_document, operations_text

    todo = pairs(plan, whole)
    with busy("comparing operations") as say, OnGpu(plan.graph.precision) if on_gpu else nullcontext(OnCpu()) as runner:
        compared: list[OperationComparison] = []
        for number, pair in enumerate(todo, 1):
            say(f"{number} of {len(todo)}: {pair.names[0]}")
            compared.append(compare_operation(runner, pair, arguments.seed, arguments.tolerance))
    compared.sort(key=lambda comparison: -comparison.badness)
    failing = [c for c in compared if not c.passed]
    skipped = sum(c.distance is None for c in compared)
    verdict = (
        f"{len(failing)} of {len(compared)} distinct divided operations give another result than undivided"
        if failing
        else f"all {len(compared) - skipped} distinct divided operations give the same result as undivided"
    )
    if skipped:
        verdict += f"; {skipped} more do not fit the memory that is free"
    return Result(
        not failing,
        operations_text(compared, output_width(), arguments.limit),
        verdict,
        {"device": "cuda" if on_gpu else "cpu", "operations": operations_document(compared)},
    )


def _steps(arguments: argparse.Namespace, plan: Plan, whole: Plan, on_gpu: bool) -> Result:
    """Compare a whole step of both plans, from equal states and inputs."""
    from mbc.equivalence.rule import Reference, compare, passed
    from mbc.plan.summary import summarise
    from mbc.report.equivalence import step_document, step_text

    reference, third = _reference(arguments, whole)
    with tempfile.TemporaryDirectory(prefix="mbc-check-") as folder:
        places = (Path(folder) / "divided", Path(folder) / "undivided")
        subjects = (
            [built(p, place) for p, place in zip((plan, whole), places, strict=True)] if on_gpu else [plan, whole]
        )
        with busy("comparing steps") as say:
            draw = _drawing(arguments, plan, subjects, reference, third, on_gpu, say)
            count = sum(len(summary.micro_batches) > 1 for summary in summarise(plan, plan.train))
            comparisons = compare(draw, reference, plan.graph.precision, arguments.tolerance, count)
    ok = passed(comparisons)
    skipped = ""
    if reference is Reference.PERTURBED and arguments.reference is None:
        skipped = "float64 is skipped: the step is too large for NumPy (--reference float64 runs it nevertheless)"
    return Result(
        ok,
        step_text(comparisons, reference, output_width(), arguments.limit),
        "\n".join(filter(None, (_step_verdict(comparisons), skipped))),
        {"device": "cuda" if on_gpu else "cpu", "reference": str(reference), "tensors": step_document(comparisons)},
    )


def _step_verdict(comparisons: Sequence[Comparison]) -> str:
    significant = [c for c in comparisons if c.is_conclusive]
    failing = sum(not c.passed for c in significant)
    verdict = (
        f"{failing} of {len(significant)} tensors are not what the undivided step computes"
        if failing
        else f"the divided step computes what the undivided step does: {len(significant)} tensors within their limits"
    )
    noise = len(comparisons) - len(significant)
    return verdict + (f" ({noise} more are only rounding errors in both)" if noise else "")


def _reference(arguments: argparse.Namespace, whole: Plan) -> tuple[Reference, Plan | None]:
    """Return the reference for both steps, and its plan where it needs one of its own."""
    from mbc.equivalence import step_variants as variants
    from mbc.equivalence.rule import Reference

    if arguments.tolerance is not None:
        return Reference.NONE, None
    wanted = arguments.reference
    if wanted is None:
        cheap = variants.float64_is_cheap(whole.graph, whole.predictions.arena_bytes)
        wanted = Reference.FLOAT64 if cheap else Reference.PERTURBED
    if Reference(wanted) is Reference.PERTURBED:
        return Reference.PERTURBED, None
    return Reference.FLOAT64, plan_source(read_source(arguments.source), variants.in_float64(options(arguments))).plan


def _drawing(
    arguments: argparse.Namespace,
    plan: Plan,
    subjects: Sequence[Plan | Path],
    reference: Reference,
    float64: Plan | None,
    on_gpu: bool,
    say: Callable[[str], None],
) -> Callable[[int], Draw]:
    """Return a function that runs all steps on the random inputs with a given number.

    The steps run one after another, because their arenas need not fit in memory together.
    """
    from mbc.equivalence.rule import Draw, Reference
    from mbc.equivalence.run_step import random_inputs, run_step
    from mbc.measure.gemm_trial import TOLERANCES

    device, seed = "cuda" if on_gpu else "cpu", arguments.seed

    def draw(number: int) -> Draw:
        inputs = random_inputs(plan.graph, seed, number)
        say("the undivided step")
        undivided = run_step(subjects[1], device, inputs, seed)
        say("the divided step")
        divided = run_step(subjects[0], device, inputs, seed, undivided.attempts)
        if divided.attempts > undivided.attempts:  # the divided step overflowed where the undivided one did not
            undivided = run_step(subjects[1], device, inputs, seed, divided.attempts)
        third = None
        if reference is Reference.PERTURBED:
            say("the undivided step, perturbed")
            noise = TOLERANCES[plan.graph.precision]
            third = run_step(subjects[1], device, inputs, seed, divided.attempts, noise)
        elif float64 is not None:
            say("the step in float64")
            third = run_step(float64, "cpu", inputs, seed, divided.attempts)
        return Draw(divided, undivided, third)

    return draw
