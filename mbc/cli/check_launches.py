"""The command `mbc check --launches`."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from mbc.cli.arguments.shared import options
from mbc.cli.check_places import built, on_gpu
from mbc.cli.subject import check_plannable, find_plan
from mbc.cli.terminal import output_width
from mbc.errors import MbcError
from mbc.progress import busy

WORST = 10  # launches that are shown, unless --limit says


def run(arguments: argparse.Namespace) -> int:
    """Check every launch of a plan; return 1 where a launch computes a wrong result."""
    from mbc.equivalence.launches import check_launches
    from mbc.report.launches import document, kinds_text, launches_text, verdict
    from mbc.runtime.library import LIBRARY_FILE

    if arguments.reference is not None or arguments.tolerance is not None:
        arguments.refuse("--reference and --tolerance are rules for divided steps: leave them out with --launches")
    asked = options(arguments)
    check_plannable(arguments.source, asked)
    plan = find_plan(arguments.source, asked)
    if plan.graph.ranks is not None:
        raise MbcError(
            "MBC279",
            f"launches are checked in one process, and '{arguments.source}' is a plan for {plan.graph.ranks.size} GPUs",
            "check its source, or compile with --gpus 1",
        )
    gpu = on_gpu(arguments.device, plan)
    with tempfile.TemporaryDirectory(prefix="mbc-check-") as folder:
        subject = plan
        if gpu:
            package = Path(arguments.source)
            subject = package if (package / LIBRARY_FILE).is_file() else built(plan, Path(folder) / "package")
        with busy("checking launches") as say:
            checked = check_launches(subject, "cuda" if gpu else "cpu", arguments.steps, arguments.seed, say)
    graph = plan.graph
    if arguments.json:
        about = {"network": graph.name, "batch": graph.batch, "precision": str(graph.precision)}
        print(json.dumps({**about, **document(checked), "passed": checked.passed}, indent=2))
    else:
        where = "GPU" if gpu else "CPU"
        print(f"{graph.name}: batch {graph.batch}, {graph.precision}, launch by launch, on the {where}\n")
        limit = WORST if arguments.limit is None else arguments.limit
        print(f"{kinds_text(checked, output_width())}\n\n{launches_text(checked, limit, output_width())}\n")
        print(verdict(checked))
    return 0 if checked.passed else 1
