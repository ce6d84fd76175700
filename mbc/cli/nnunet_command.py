"""The command `mbc nnunet`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mbc.cli.arguments.shared import options
from mbc.cli.terminal import notes, output_width, terminated_as_interrupted
from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.fit import Probe
from mbc.hardware.target import find_device, free_bytes
from mbc.options import Options
from mbc.plan.model import Plan
from mbc.progress import busy
from mbc.pytorch.nnunet.network_settings import source
from mbc.pytorch.nnunet.plans_file import Configuration, Dataset, dataset_of, read_plans
from mbc.pytorch.nnunet.prospects import Prospect, Question, judge
from mbc.report.prospects import probe_line, prospect_line, prospects_document, prospects_text
from mbc.stages import Stages
from mbc.units import show_enough, show_given


def run(arguments: argparse.Namespace) -> int:
    """Print predictions of the configurations of plans files.

    Each probe is printed on stderr as soon as it is planned, and each configuration before the next one is planned.
    After Ctrl-C or SIGTERM the table of the configurations so far is printed, and the exit code is 130.

    Raises:
        MbcError: MBC395, no configuration fits the budget; or an error of a file or of planning.
    """
    chosen = _chosen(arguments)
    asked = options(arguments)
    device = find_device(asked.gpu)
    budget_bytes = arguments.memory or free_bytes(device, asked.gpu)
    network, prospects, finished = source(), list[Prospect](), True
    with notes(), terminated_as_interrupted(), busy("planning nnU-Net") as at:

        def plan(which: Options, name: str) -> Plan:
            return compile_plan(network, which, Stages(announce=lambda stage: at(f"{name}: {stage}")))

        def tell(name: str, probe: Probe) -> None:
            at.line(probe_line(name, probe))

        try:
            for number, (configuration, dataset) in enumerate(chosen, 1):
                question = Question(
                    dataset, asked, budget_bytes, device.memory_bytes, arguments.largest, not arguments.quick
                )
                prospects.append(judge(configuration, question, plan, tell))
                at.line(prospect_line(prospects[-1], number, len(chosen)))
        except KeyboardInterrupt:
            finished = False
    result = (prospects, device.name, budget_bytes)
    if arguments.json:
        print(json.dumps(prospects_document(*result, finished), indent=2))
    else:
        print(prospects_text(*result, output_width()))
    if not finished:
        print("interrupted", file=sys.stderr)
        return 130
    if any(p.probe.figures is not None for p in prospects):
        return 0
    refusal = _nothing_fits(prospects, device.name, budget_bytes)
    if not arguments.json:
        raise refusal
    print(refusal, file=sys.stderr)  # the document, which is printed, says so, too
    return 1


def _chosen(arguments: argparse.Namespace) -> Sequence[tuple[Configuration, Dataset]]:
    """Return the configurations of the plans files that are asked for, each with its data set."""
    read = [(one, Path(path)) for path in arguments.plans for one in read_plans(Path(path))]
    names = dict.fromkeys(one.name for one, _ in read)
    for name in arguments.configurations:
        if name not in names:
            raise MbcError(
                "MBC393", f"no plans file has a configuration '{name}'", f"choose one of {', '.join(names) or 'none'}"
            )
    wanted = arguments.configurations or names
    named = Path(arguments.dataset) if arguments.dataset else None
    datasets = {path: dataset_of(path, named, arguments.channels, arguments.classes) for _, path in read}
    return [(one, datasets[path]) for one, path in read if one.name in wanted]


def _nothing_fits(prospects: Sequence[Prospect], gpu: str, budget_bytes: int) -> MbcError:
    leasts = [(p.least.budget_bytes, p.configuration.name) for p in prospects if p.least is not None]
    remedy = "choose a GPU with more memory, or plans for a smaller one"
    if leasts:
        least_bytes, name = min(leasts)
        remedy = f"raise --memory to {show_enough(least_bytes)}, in which '{name}' trains"
    return MbcError("MBC395", f"no configuration trains within {show_given(budget_bytes)} on {gpu}", remedy)
