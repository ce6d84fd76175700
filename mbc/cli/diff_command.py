"""The command `mbc diff`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mbc.cli.arguments.shared import Sharing, options
from mbc.cli.outputs import check_outputs
from mbc.cli.subject import check_plannable, plan_file, plan_source, plans_of_ranks, read_source
from mbc.cli.terminal import notes, output_width
from mbc.errors import MbcError
from mbc.hardware.target import find_device
from mbc.options import Options
from mbc.report.collectives import ranks_text
from mbc.units import show_size, show_written

if TYPE_CHECKING:
    from mbc.plan.model import Plan


class Side(NamedTuple):
    """One of two compared plans with its title, and the plans of the ranks that run another plan."""

    plan: Plan
    title: str
    others: tuple[Plan, ...] = ()


def run(arguments: argparse.Namespace) -> int:
    """Print the differences between two plans, or write them as a page."""
    check_outputs({"-o": arguments.output or None}, {f"plan {n}": place for n, place in enumerate(arguments.plans, 1)})
    with notes():  # a note on both plans is printed once
        first, second = _sides(arguments)
    if arguments.output:
        return _page(arguments, first, second)
    from mbc.plan.diff import diff_plans

    diff = diff_plans(first.plan, second.plan)
    if arguments.json:
        from mbc.report.documents import diff_document

        print(json.dumps(diff_document(diff), indent=2))
        return 0
    from mbc.report.differences import diff_text

    print(
        diff_text(
            diff, first.title, second.title, width=output_width(), limit=arguments.limit, with_times=arguments.times
        )
    )
    return 0


def _page(arguments: argparse.Namespace, first: Side, second: Side) -> int:
    from mbc.report.html.diff_page import diff_page
    from mbc.report.html.render import write_text

    path = Path(arguments.output)
    text = diff_page(first.plan, second.plan, first.title, second.title, first.others, second.others)
    write_text(path, text)
    print(f"{path}: {show_size(len(text.encode()))}")
    return 0


def _sides(arguments: argparse.Namespace) -> tuple[Side, Side]:
    """Return the two plans to compare, with their titles.

    They come from two files, or from one source that is planned for two GPUs or for two numbers of GPUs. If a source is
    planned for unlike GPUs that share a mini-batch, the plans of the first two GPUs are compared.
    """
    plans, gpus, sharings = arguments.plans, arguments.gpus, arguments.sharings
    if len(plans) == 1 and plan_file(plans[0]) is None:
        if not gpus and len(sharings) == 1 and _are_unlike(sharings[0]):
            planned = plan_source(read_source(plans[0]), options(arguments, sharing=sharings[0]))
            one, other, *rest = planned.plan, *planned.others
            return Side(one, _title(one), (other, *rest)), Side(other, _title(other), (one, *rest))
        if (len(gpus), len(sharings)) in ((2, 0), (2, 1), (0, 2), (1, 2)):
            titles = gpus if len(gpus) == 2 else [_called(sharing) for sharing in sharings]
            asked = _twice(arguments, gpus, sharings)
            first, second = (_side(plans[0], one, title) for one, title in zip(asked, titles, strict=True))
            return first, second
    if len(plans) == 2 and len(gpus) <= 1 and len(sharings) <= 1:
        asked = _twice(arguments, gpus, sharings)
        if all(plan_file(plan) is not None for plan in plans):
            check_plannable(plans[0], asked[0])
        first, second = (_side(plan, one, plan) for plan, one in zip(plans, asked, strict=True))
        return first, second
    if len(plans) == 1 and plan_file(plans[0]) is not None:
        for one in _twice(arguments, gpus, sharings):
            check_plannable(plans[0], one)
    given = [*(f"--gpu {gpu}" for gpu in gpus), *(f"--gpus {_words(sharing)}" for sharing in sharings)]
    raise MbcError(
        "MBC186",
        f"cannot compare {_counted(len(plans), 'plan')}{' with ' if given else ''}{' '.join(given)}: diff takes two",
        "name two plans (or packages, or sources), or one source and --gpu twice, or --gpus twice, or --gpus A,B for"
        " unlike GPUs",
    )


def _side(place: str, asked: Options, title: str) -> Side:
    plan, *others = plans_of_ranks(place, asked)
    return Side(plan, title, tuple(others))


def _twice(arguments: argparse.Namespace, gpus: Sequence[str], sharings: Sequence[Sharing]) -> list[Options]:
    """Return the options of both plans; an option given once is for both.

    The GPUs and options of both are checked before the first plan is made.
    """
    for gpu in gpus:
        find_device(gpu)
    return [
        options(
            arguments,
            gpus[min(i, len(gpus) - 1)] if gpus else None,
            sharings[min(i, len(sharings) - 1)] if sharings else None,
        )
        for i in range(2)
    ]


def _are_unlike(sharing: Sharing) -> bool:
    return not isinstance(sharing, int) and len(set(sharing)) > 1


def _words(sharing: Sharing) -> str:
    """Return the GPUs as the command line writes them."""
    if isinstance(sharing, int):
        return str(sharing)
    return ",".join(
        one.gpu if one.memory_bytes is None else f"{one.gpu}:{show_written(one.memory_bytes)}" for one in sharing
    )


def _called(sharing: Sharing) -> str:
    return _counted(sharing, "GPU") if isinstance(sharing, int) else _words(sharing)


def _title(plan: Plan) -> str:
    members = () if plan.graph.ranks is None else plan.graph.ranks.members
    return f"{ranks_text(members)} ({plan.target.gpu})"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
