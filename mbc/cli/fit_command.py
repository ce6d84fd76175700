"""The command `mbc fit`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from mbc.cli.arguments.shared import options
from mbc.cli.subject import read_source
from mbc.cli.terminal import TimeOver, interrupted_after, notes, output_width, terminated_as_interrupted
from mbc.errors import MbcError
from mbc.options import Options
from mbc.progress import busy
from mbc.source import Source

if TYPE_CHECKING:
    from mbc.plan.model import Plan


def run(arguments: argparse.Namespace) -> int:
    """Print the largest batch within a budget, or the time of a step over the budget.

    Each probe is printed on stderr as soon as it is planned. At the end of --search-for, and after Ctrl-C or SIGTERM,
    the table of the probes so far is printed. The exit code is 0 if a batch fits.

    Raises:
        MbcError: MBC329, the time of --search-for is over before a batch was planned that fits.
    """
    try:
        return _print_fit(arguments)
    except TimeOver:
        raise MbcError(
            "MBC329",
            "the time of --search-for is over, and no batch that fits has been planned",
            "give more time, or begin with a smaller batch: --set batch=N",
        ) from None


def _print_fit(arguments: argparse.Namespace) -> int:
    from mbc.fit import LEAST_STEP, Batches, budget_curve, figures, largest_batch, own_batch, with_batch, with_budget
    from mbc.frontend.lower import lower
    from mbc.frontend.parse import parse
    from mbc.hardware.target import find_device
    from mbc.plan.require_times import require_predicted_times
    from mbc.report import fit as report

    source = read_source(arguments.source)
    asked = _asked(arguments)
    with notes(), terminated_as_interrupted(), busy(f"fitting {arguments.source}") as at:
        start = None if arguments.curve else own_batch(source, asked)
        lowered, device = lower(parse(source), asked.settings, asked.network), find_device(asked.gpu)
        head = report.heading(lowered.network.name, lowered.precision, device, asked.gpus)
        if start is None:
            require_predicted_times(lowered.network.name, lowered.precision, "a curve of step times")

            def plan_within(budget_bytes: int) -> Plan:
                return _plan(source, with_budget(asked, budget_bytes), report.within(budget_bytes), at)

            with interrupted_after(arguments.search_for):
                curve = budget_curve(plan_within, arguments.points, lambda probe: at.line(report.budget_line(probe)))
            text, document = report.budgets_text(curve, output_width()), report.budgets_document(curve)
            finished = curve.finished
        else:
            exact = math.isfinite(arguments.search_for)
            rates = [0.0]  # images/s of the batches so far

            def plan_batch(batch: int) -> Plan:
                plan = _plan(source, with_batch(asked, batch, 0.0 if exact else max(rates)), f"batch {batch}", at)
                rates.append(figures(plan).images_per_s)
                return plan

            batches = Batches(
                start,
                math.lcm(arguments.multiple, asked.gpus),  # equal rows on all GPUs
                asked.micro_batch * asked.gpus,
                ratio=1.0 if exact else LEAST_STEP,
            )
            with interrupted_after(arguments.search_for):
                fit = largest_batch(plan_batch, batches, lambda probe: at.line(report.batch_line(probe)))
            text, document = report.batches_text(fit, output_width()), report.batches_document(fit)
            finished = fit.finished
    about = {"network": lowered.network.name, "precision": str(lowered.precision), "gpu": device.name}
    about |= {"architecture": device.architecture}
    print(json.dumps(about | document, indent=2) if arguments.json else f"{head}\n\n{text}")
    if not finished:
        print("the search was stopped before its end: these are the results so far", file=sys.stderr)
    return 0


def _asked(arguments: argparse.Namespace) -> Options:
    """Return the planning options, with --precision and --memory as settings of the network."""
    from mbc.fit import with_budget

    asked = options(arguments)
    if arguments.precision is not None:
        asked = replace(asked, settings=(*asked.settings, ("train.precision", arguments.precision)))
    return asked if arguments.memory is None else with_budget(asked, arguments.memory)


def _plan(source: Source, asked: Options, which: str, say: Callable[[str], None]) -> Plan:
    from mbc.compiler import try_plan
    from mbc.stages import Stages

    return try_plan(source, asked, Stages(announce=lambda stage: say(f"{which}: {stage}")))
