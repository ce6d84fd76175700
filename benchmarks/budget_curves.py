"""Step time over the memory budget for six networks, and their memory over the step before and after.

For each network, at budgets that are shares of what its plan without a limit takes (the bare context apart): the
predicted step over the one without a limit, and over the bound. Two pictures: time over budget of all, and for each the
arena over the step by kind, without a limit and at --after of it. On a GPU the steps then run like those of
`capped.py`, with the rest of the card occupied.

    python benchmarks/budget_curves.py --plan-only --workers 32 [--only NAME ...] [--shares 1,0.8,0.66,0.5,0.4,0.33]
                                       [--after 0.33] [--precision fp32] [--profile FILE] [--gpu h200] [--again]
    python benchmarks/budget_curves.py --measure [--workers 8] [--only NAME ...] [--precision fp32] [--steps 20]
                                       [--for SECONDS]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from ahead import Task, add_arguments, drive
from cap import GB, stepped
from chart import COLOURS, HEIGHT, LEFT, RIGHT, STYLE, TOP, WIDTH, Line, chart
from modules import Job, example
from planner import Planner, Wanted
from record import RESULTS, results, start
from shelf import Shelf, unpack

from mbc.plan.live import Kind
from mbc.plan.memory import memory_curve
from mbc.plan.model import Plan

MOST_OVER_BOUND, BOUND_SHARE = 0.03, 0.5  # what is asked of every network
PLAN = "capped"
PICTURE_POINTS = 240
UNSEEN = 1000  # what takes less than this part of the scale is not drawn


def networks() -> dict[str, Job]:
    def sized(name: str, batch: int, **more: int) -> Job:
        pairs = {"batch": batch, **more}
        return example(name, *((key, str(value)) for key, value in pairs.items()))

    return {
        "alexnet 512": sized("alexnet_caffe", 512),
        "vgg16 128": sized("vgg16", 128),
        "resnet50 128": sized("resnet", 128, depth=50),
        "resnet152 64": sized("resnet", 64, depth=152),
        "densenet121 64": sized("densenet121", 64),
        "inception_v4 64": sized("inception_v4", 64),
    }


def prepared(planner: Planner, name: str, network: str, job: Job, share: float) -> dict[str, Any]:
    """One network at one share of what its plan without a limit takes."""
    free = planner.ask(Wanted.of(planner.card.unlimited(job))).figures
    row: dict[str, Any] = {"network": network, "share": share}
    if "failed" in free:
        return row | {"failed": free["failed"]}
    cap_bytes = int(share * free["counted_gb"] * GB) + 1
    row |= {"cap_gb": cap_bytes / GB} | planner.keep(name, PLAN, Wanted.of(planner.card.capped(job, cap_bytes)))
    if "failed" in row:
        return row
    row |= {"plans": {PLAN: cap_bytes}, "over_unlimited": row["predicted_ms"] / free["predicted_ms"] - 1}
    if share == BOUND_SHARE:
        row["passed"] = row["over_bound"] <= MOST_OVER_BOUND
    return row


def measured(row: dict[str, Any], timed: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return row | stepped(row, timed[PLAN])


def row_name(network: str, share: float) -> str:
    return f"{network} at {share:.0%}"


def time_picture(rows: Sequence[Mapping[str, Any]]) -> str:
    """The step over the budget, both in per cent of what they are without a limit."""
    names = dict.fromkeys(row["network"] for row in rows)
    lines = [
        Line(
            name,
            tuple(
                sorted(
                    (100 * row["share"], 100 * (1 + row["over_unlimited"]))
                    for row in rows
                    if row["network"] == name and "over_unlimited" in row
                )
            ),
        )
        for name in names
    ]
    return chart(
        "Predicted step over the memory budget", "budget, % of the unlimited plan's memory", "step, % of the unlimited",
        [line for line in lines if line.points],
    )  # fmt: skip


def memory_picture(title: str, plans: Mapping[str, Plan]) -> str:
    """The arena over the step, one panel a plan, by kind on top of one another, on one scale."""
    top = max(max(memory_curve(plan, plan.train).total_bytes) for plan in plans.values())
    kinds = [kind for kind in Kind if any(max(_curve(plan)[kind]) * UNSEEN >= top for plan in plans.values())]
    panel = HEIGHT - TOP
    height = TOP + panel * len(plans)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="24">{escape(title)}</text>',
    ]
    for number, (name, plan) in enumerate(plans.items()):
        floor = TOP + panel * (number + 1) - 44
        parts += _panel(name, plan, kinds, top, floor, panel - 68)
    for number, kind in enumerate(kinds):
        y = TOP + 12 + 22 * number
        left, colour = WIDTH - RIGHT + 16, _colour(kinds, kind)
        parts.append(f'<rect x="{left}" y="{y - 8}" width="18" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{left + 26}" y="{y + 4}">{escape(str(kind))}</text>')
    return "\n".join((*parts, "</svg>")) + "\n"


def _panel(name: str, plan: Plan, kinds: Sequence[Kind], top: int, floor: float, height: float) -> list[str]:
    by_kind = _curve(plan)
    count = len(plan.train.launches)
    at = sorted({count * i // PICTURE_POINTS for i in range(PICTURE_POINTS)} | {count - 1})
    width = WIDTH - LEFT - RIGHT
    parts = [f'<text x="{LEFT}" y="{floor - height - 8:.1f}">{escape(name)}</text>']
    below = [0] * len(at)
    for kind in kinds:
        # The most of each stretch, so that no peak is lost between two points.
        ends = [*at[1:], count]
        above = [low + max(by_kind[kind][start:stop] or (0,)) for low, start, stop in zip(below, at, ends, strict=True)]
        xs = [LEFT + width * i / max(1, count - 1) for i in at]
        upper = [f"{x:.1f},{floor - height * y / top:.1f}" for x, y in zip(xs, above, strict=True)]
        lower = [f"{x:.1f},{floor - height * y / top:.1f}" for x, y in zip(xs, below, strict=True)]
        parts.append(f'<polygon fill="{_colour(kinds, kind)}" points="{" ".join((*upper, *reversed(lower)))}"/>')
        below = above
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{floor:.1f}" x2="{WIDTH - RIGHT}" y2="{floor:.1f}"/>')
    parts.append(f'<text x="{LEFT - 8}" y="{floor - height + 4:.1f}" text-anchor="end">{top / GB:.1f} GB</text>')
    parts.append(
        f'<text x="{LEFT}" y="{floor + 18:.1f}">{count} launches, {plan.predictions.train_us / 1e3:.1f} ms, '
        f"arena {plan.predictions.arena_bytes / GB:.2f} GB, host {plan.predictions.host_bytes / GB:.2f} GB</text>"
    )
    return parts


def _curve(plan: Plan) -> Mapping[Kind, tuple[int, ...]]:
    return memory_curve(plan, plan.train).bytes_by_kind


def _colour(kinds: Sequence[Kind], kind: Kind) -> str:
    return COLOURS[kinds.index(kind) % len(COLOURS)]


def draw(shelf: Shelf, name: str, shares: Sequence[float], after: float, precision: str) -> None:
    """The pictures of what is planned by now, whatever made it."""
    rows = list(results(f"{name}_planned").rows.values())
    drawn = [row for row in rows if "over_unlimited" in row]
    if drawn:
        (RESULTS / f"{name}.svg").write_text(time_picture(drawn), encoding="utf-8")
    for network in networks():
        paths = {f"{network}, no limit": shelf.path(row_name(network, max(shares)), PLAN)}
        paths[f"{network}, {after:.0%} of it"] = shelf.path(row_name(network, after), PLAN)
        if all(path.exists() for path in paths.values()):
            picture = memory_picture(
                f"Arena over the step: {network}, {precision}", {what: unpack(path) for what, path in paths.items()}
            )
            path = RESULTS / f"memory_{network.replace(' ', '_')}.svg"
            path.write_text(picture, encoding="utf-8")
            print(f"{network}: {path.name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", default="1,0.8,0.66,0.5,0.4,0.33", help="1 is planned whatever is said here")
    parser.add_argument("--after", type=float, default=0.33, help="share of the second memory picture (default 0.33)")
    parser.add_argument("--precision", default="fp32")
    add_arguments(parser)
    arguments = parser.parse_args()
    shares = sorted({1.0, arguments.after, *map(float, arguments.shares.split(","))}, reverse=True)
    name = f"budget_curves_{arguments.precision}"
    tasks = [
        Task(row, partial(prepared, name=row, network=network, job=job, share=share), measured)
        for network, plain in networks().items()
        for job in [plain.with_settings(("train.precision", arguments.precision))]
        for share in shares
        for row in [row_name(network, share)]
    ]
    drive(name, tasks, _COLUMNS, arguments)
    if arguments.plan_only:
        draw(Shelf(arguments.plans), name, shares, arguments.after, arguments.precision)


_COLUMNS = [
    "name", "cap_gb", "counted_gb", "host_gb", "predicted_ms", "step_ms", "over_unlimited", "over_bound",
    "predicted_over_measured", "plan_s", "passed",
]  # fmt: skip


if __name__ == "__main__":
    start(main)
