"""The command `mbc report`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mbc.cli.arguments.shared import options
from mbc.cli.outputs import check_outputs, default_output
from mbc.cli.subject import check_plannable, plans_of_ranks, read_text
from mbc.cli.terminal import notes
from mbc.progress import busy
from mbc.units import show_size

if TYPE_CHECKING:
    from mbc.optimize.bounds.measured_floor import Floor
    from mbc.options import Options
    from mbc.plan.model import Plan


def run(arguments: argparse.Namespace) -> int:
    """Write a plan as a page in a single file."""
    asked = options(arguments)
    recorded = {f"--with {name}": name for name in arguments.recorded}
    check_outputs({"-o": arguments.output}, {"the plan": arguments.plan, **recorded})
    check_plannable(arguments.plan, asked)
    from mbc.report.html.plan_page import plan_page
    from mbc.report.html.recorded import read_recorded
    from mbc.report.html.render import write_text
    from mbc.report.measured import measured_step

    files_read = [(name, read_recorded(read_text(Path(name)), name)) for name in arguments.recorded]
    plan, *others = plans_of_ranks(arguments.plan, asked)
    steps = [measured_step(plan, result, name) for name, result in files_read if result["what"] == "step"]
    recorded = [result for _, result in files_read if result["what"] != "step"]
    floor = _floor(plan, asked) if arguments.floor else None
    path = Path(arguments.output or default_output(arguments.plan, ".html"))
    with busy(f"writing {path}"):
        measured = steps[-1] if steps else None
        text = plan_page(plan, floor=floor, recorded=recorded, measured=measured, others=others)
        write_text(path, text)
    print(f"{path}: {show_size(len(text.encode()))}")
    return 0


def _floor(plan: Plan, asked: Options) -> Floor:
    from mbc.analysis.roofline import device_of
    from mbc.optimize.bounds.measured_floor import graph_floor
    from mbc.profile.locate import find_profile

    device = device_of(plan)
    with notes(), busy("finding the floor"):
        return graph_floor(plan.graph, device, find_profile(device, asked.profile, asked.stale_profile))
