"""The command `mbc trace`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mbc.cli.arguments.shared import options
from mbc.cli.outputs import check_outputs, default_output
from mbc.cli.subject import check_plannable, plans_of_ranks, read_text


def run(arguments: argparse.Namespace) -> int:
    """Write the predicted step of a plan as a trace for Perfetto, with the measured step if one was recorded."""
    asked = options(arguments)
    check_outputs({"-o": arguments.output}, {"the plan": arguments.plan, "--with": arguments.recorded})
    check_plannable(arguments.plan, asked)
    from mbc.plan.require_times import require_predicted_times
    from mbc.report.html.recorded import read_recorded
    from mbc.report.html.render import write_text
    from mbc.report.measured import measured_step
    from mbc.report.trace import trace_document

    name: str | None = arguments.recorded
    record = {} if name is None else read_recorded(read_text(Path(name)), name)
    plan, *others = plans_of_ranks(arguments.plan, asked)
    require_predicted_times(plan.graph.name, plan.graph.precision, "a trace")
    path = Path(arguments.output or default_output(arguments.plan, ".trace.json"))
    trace = trace_document(plan, None if name is None else measured_step(plan, record, name), others)
    write_text(path, json.dumps(trace, separators=(",", ":")))
    print(f"{path}: {len(trace['traceEvents']):,} events; open it at https://ui.perfetto.dev")
    return 0
