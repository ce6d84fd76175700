"""`mbc show`"""

from __future__ import annotations

import argparse
import json

from mbc.cli.arguments import options
from mbc.cli.places import check_plannable, find_plan
from mbc.cli.terminal import output_width


def run(arguments: argparse.Namespace) -> int:
    """Print a plan as tables, or as JSON with the memory at every launch."""
    check_plannable(arguments.plan, options(arguments))
    plan = find_plan(arguments.plan, options(arguments))
    if arguments.json:
        from mbc.report.documents import plan_document

        print(json.dumps(plan_document(plan, memory=True), indent=2))
        return 0
    from mbc.report.tables import plan_text

    print(
        plan_text(plan, width=output_width(), limit=arguments.limit, by_kind=arguments.by_kind, infer=arguments.infer)
    )
    return 0
