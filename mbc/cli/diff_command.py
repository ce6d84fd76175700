"""`mbc diff`"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from mbc.cli.arguments.groups import options
from mbc.cli.places import check_plannable, find_plan, plan_file, plan_source, read_source
from mbc.cli.terminal import output_width
from mbc.errors import MbcError
from mbc.report.collectives import ranks_text

if TYPE_CHECKING:
    from mbc.plan.model import Plan


def run(arguments: argparse.Namespace) -> int:
    """Print what differs between two plans."""
    (before, before_title), (after, after_title) = _sides(arguments)
    from mbc.plan.diff import diff_plans

    diff = diff_plans(before, after)
    if arguments.json:
        from mbc.report.documents import diff_document

        print(json.dumps(diff_document(diff), indent=2))
        return 0
    from mbc.report.differences import diff_text

    print(
        diff_text(
            diff, before_title, after_title, width=output_width(), limit=arguments.limit, with_times=arguments.times
        )
    )
    return 0


def _sides(arguments: argparse.Namespace) -> tuple[tuple[Plan, str], tuple[Plan, str]]:
    """Two plans and what to call them: by their place, or by the GPU that one source is planned for; of GPUs that share
    a mini-batch, those of the first two that are unlike."""
    plans, gpus = arguments.plans, arguments.gpus
    if len(plans) == 1 and not gpus and options(arguments).rank_gpus and plan_file(plans[0]) is None:
        planned = plan_source(read_source(plans[0]), options(arguments))
        if planned.others:
            return (planned.plan, _title(planned.plan)), (planned.others[0], _title(planned.others[0]))
    if len(plans) == 1 and len(gpus) == 2 and plan_file(plans[0]) is None:
        first, second = ((find_plan(plans[0], options(arguments, gpu)), gpu) for gpu in gpus)
        return first, second
    if len(plans) == 2 and len(gpus) <= 1:
        gpu = gpus[0] if gpus else None
        if all(plan_file(plan) is not None for plan in plans):
            check_plannable(plans[0], options(arguments, gpu))
        first, second = ((find_plan(plan, options(arguments, gpu)), plan) for plan in plans)
        return first, second
    raise MbcError(
        "MBC186",
        f"cannot compare {_counted(len(plans), 'plan')} with {_counted(len(gpus), 'GPU')}",
        "name two plans (or packages, or sources), or one source and --gpu twice, or --gpus A,B",
    )


def _title(plan: Plan) -> str:
    members = () if plan.graph.ranks is None else plan.graph.ranks.members
    return f"{ranks_text(members)} ({plan.target.gpu})"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
