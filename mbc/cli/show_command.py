"""The command `mbc show`."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from mbc.cli.arguments.shared import options
from mbc.cli.subject import check_plannable, find_plan, read_source
from mbc.cli.terminal import notes, output_width
from mbc.progress import busy

if TYPE_CHECKING:
    from mbc.plan.model import Plan


def run(arguments: argparse.Namespace) -> int:
    """Print a plan as tables, or as JSON with the memory at every launch; or print the effect of each technique."""
    if arguments.ablation:
        return _ablation(arguments)
    check_plannable(arguments.plan, options(arguments))
    plan = find_plan(arguments.plan, options(arguments))
    if arguments.roofline:
        return _roofline(arguments, plan)
    if arguments.json:
        from mbc.report.documents import plan_document

        print(json.dumps(plan_document(plan, memory=True), indent=2))
        return 0
    from mbc.report.show import plan_text

    print(
        plan_text(plan, width=output_width(), limit=arguments.limit, by_kind=arguments.by_kind, infer=arguments.infer)
    )
    return 0


def _ablation(arguments: argparse.Namespace) -> int:
    from mbc.ablation import ablation
    from mbc.compiler import try_plan
    from mbc.fit import with_budget
    from mbc.report.ablation import ablation_document, ablation_text
    from mbc.stages import Stages

    source = read_source(arguments.plan, "give its source (.mbc) to --ablation")
    asked = options(arguments)
    with notes(), busy(f"planning {arguments.plan}") as say:

        def plan_with(without: frozenset[str], budget_bytes: int | None) -> Plan:
            planning = replace(asked, without=without)
            planning = planning if budget_bytes is None else with_budget(planning, budget_bytes)
            which = f"without {', '.join(sorted(without))}" if without else "with all techniques"
            return try_plan(source, planning, Stages(announce=lambda stage: say(f"{which}: {stage}")))

        ablations = ablation(plan_with, asked.without)
    shown = json.dumps(ablation_document(ablations), indent=2) if arguments.json else None
    print(shown or ablation_text(ablations, output_width()))
    return 0


def _roofline(arguments: argparse.Namespace, plan: Plan) -> int:
    from mbc.analysis.roofline import device_of
    from mbc.optimize.bounds.measured_floor import graph_floor
    from mbc.profile.locate import find_profile
    from mbc.report.roofline import roofline_document, roofline_text

    floor = None
    device = device_of(plan)
    if not arguments.infer:
        with notes(), busy("finding the floor"):
            floor = graph_floor(plan.graph, device, find_profile(device, arguments.profile, arguments.stale_profile))
    if arguments.json:
        print(json.dumps(roofline_document(plan, floor, infer=arguments.infer), indent=2))
        return 0
    print(
        roofline_text(
            plan, floor,
            width=output_width(), limit=arguments.limit, by_kind=arguments.by_kind, infer=arguments.infer,
        )
    )  # fmt: skip
    return 0
