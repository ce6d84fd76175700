"""`mbc trace`"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mbc.cli.arguments.groups import options
from mbc.cli.places import check_plannable, find_plan


def run(arguments: argparse.Namespace) -> int:
    """Write the predicted step of a plan as a trace for Perfetto."""
    asked = options(arguments)
    check_plannable(arguments.plan, asked)
    from mbc.report.html.render import write_text
    from mbc.report.trace import trace_document

    plan = find_plan(arguments.plan, asked)
    path = Path(arguments.output or f"{plan.graph.name}.trace.json")
    trace = trace_document(plan)
    write_text(path, json.dumps(trace, separators=(",", ":")))
    print(f"{path}: {len(trace['traceEvents']):,} events; open it at https://ui.perfetto.dev")
    return 0
