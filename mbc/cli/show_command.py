"""`mbc show`"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from mbc.cli.arguments import options
from mbc.cli.places import check_plannable, find_plan
from mbc.cli.terminal import busy, notes, output_width

if TYPE_CHECKING:
    from mbc.plan.model import Plan


def run(arguments: argparse.Namespace) -> int:
    """Print a plan as tables, or as JSON with the memory at every launch."""
    check_plannable(arguments.plan, options(arguments))
    plan = find_plan(arguments.plan, options(arguments))
    if arguments.roofline:
        return _roofline(arguments, plan)
    if arguments.json:
        from mbc.report.documents import plan_document

        print(json.dumps(plan_document(plan, memory=True), indent=2))
        return 0
    from mbc.report.tables import plan_text

    print(
        plan_text(plan, width=output_width(), limit=arguments.limit, by_kind=arguments.by_kind, infer=arguments.infer)
    )
    return 0


def _roofline(arguments: argparse.Namespace, plan: Plan) -> int:
    from mbc.device.profile_places import find_profile
    from mbc.optimize.floor import graph_floor
    from mbc.plan.roofline import device_of
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
