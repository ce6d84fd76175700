"""Arguments that several commands share, and the options of the compiler that they set."""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from mbc.cli.arguments.argument_types import count, duration, network, setting, shared_by, size, techniques
from mbc.cli.arguments.parser import Once
from mbc.errors import MbcError
from mbc.options import OWN_FIRST, PROVIDER_NAMES, TECHNIQUES, UNLIMITED_BYTES, Measure, Options, Policy, RankGpu

Sharing = int | tuple[RankGpu, ...]  # number of GPUs, or their names and memory

_SHARING = (
    "share each mini-batch between N GPUs: batch counts the rows of all of them (default 1); or between the named GPUs,"
    " each with the number of rows that makes the step shortest, and B within SIZE of its memory"
)


class Raw(argparse.RawDescriptionHelpFormatter):
    """A help formatter that keeps the line breaks of examples."""

    def __init__(self, prog: str) -> None:
        """Leave 28 columns for the names of options."""
        super().__init__(prog, max_help_position=28)


class Commands(Protocol):
    """The result of argparse's add_subparsers."""

    def add_parser(
        self, name: str, *, help: str, description: str, epilog: str, formatter_class: type[argparse.HelpFormatter]
    ) -> argparse.ArgumentParser:
        """Add a command."""
        ...


def command(commands: Commands, name: str, short: str, examples: str) -> argparse.ArgumentParser:
    """Add a command with a summary and examples; its module `mbc.cli.NAME_command` is imported when it runs."""
    parser = commands.add_parser(
        name, help=short, description=short, epilog=f"examples:\n{examples}", formatter_class=Raw
    )
    parser.set_defaults(run=_later(name))
    return parser


def _later(name: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        return importlib.import_module(f"mbc.cli.{name}_command").run(arguments)

    return run


def add_planning(parser: argparse.ArgumentParser, gpu: bool = True) -> None:
    """Add the arguments of commands that may plan a source."""
    group = parser.add_argument_group("planning (of a .mbc source)")
    if gpu:
        group.add_argument(
            "--gpu", default="auto", action=Once,
            help="GPU to plan for (see mbc gpus), NAME@N: N of its multiprocessors, NAME@sm_80: as which it"
            " poses, or a file card.json with the"
            " figures of one's own; default: this machine's, else h200",
        )  # fmt: skip
    group.add_argument(
        "--set", dest="settings", action="append", default=[], type=setting, metavar="NAME=VALUE",
        help="set a parameter of the network or of a section, such as batch=64 or memory.device=8GB; may be repeated",
    )  # fmt: skip
    group.add_argument("--network", help="name of the network, where the source has several")
    group.add_argument(
        "--policy", choices=tuple(map(str, Policy)), default=str(Options().policy),
        help="micro-batch sizes that an operation may be divided into (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--micro-batch", type=count, default=0, metavar="ROWS",
        help="divide every convolution into kernel calls of ROWS rows (default: the fastest choice)",
    )  # fmt: skip
    group.add_argument(
        "--without", type=techniques, action="extend", default=[], metavar="T,T",
        help=f"leave out techniques: {', '.join(TECHNIQUES)} (see mbc show --ablation)",
    )  # fmt: skip
    group.add_argument(
        "--workspace-limit", type=size, default=UNLIMITED_BYTES, metavar="SIZE",
        help="most workspace for one operation (default: the bytes of the budget that are free when it runs)",
    )  # fmt: skip
    group.add_argument(
        "--workspace-total", type=size, default=UNLIMITED_BYTES, metavar="SIZE",
        help="workspace of all operations together; each operation gets a part of its own",
    )  # fmt: skip
    group.add_argument(
        "--provider", dest="providers", action="append", default=[], choices=(*PROVIDER_NAMES, OWN_FIRST),
        help=f"source of kernels that may be used; may be repeated (default: all); {OWN_FIRST}: of libraries only for "
        "operations that no kernel of mbc runs on tensor cores",
    )  # fmt: skip
    group.add_argument(
        "--profile", metavar="FILE",
        help="measured kernel times to plan with (default: your own of this GPU, and the bundled ones)",
    )  # fmt: skip
    group.add_argument(
        "--stale-profile",
        action="store_true",
        help="use the times of a --profile for another GPU or cuDNN as estimates",
    )


def add_sharing(parser: argparse.ArgumentParser) -> None:
    """Add the number of GPUs that share a mini-batch."""
    parser.add_argument(
        "--gpus", dest="shared_by", type=shared_by, default=1, action=Once, metavar="N|A,B:SIZE", help=_SHARING
    )
    _add_per_node(parser)


def add_two_sharings(parser: argparse.ArgumentParser) -> None:
    """Add the number of GPUs that share a mini-batch, which may be given twice to compare two plans."""
    parser.add_argument(
        "--gpus", dest="sharings", type=shared_by, default=[], action="append", metavar="N|A,B:SIZE",
        help=f"{_SHARING}; twice with one source",
    )  # fmt: skip
    _add_per_node(parser)


def _add_per_node(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpus-per-node", type=count, default=0, action=Once, metavar="N",
        help="number of GPUs in one machine, which share its memory (default: all of --gpus)",
    )  # fmt: skip
    parser.add_argument(
        "--node-link", type=network, default=0.0, action=Once, metavar="RATE",
        help="network of each machine in each direction, such as 400Gb, 100GbE or 2x200Gb (default: what was measured"
        " through sockets, else 25Gb is assumed)",
    )  # fmt: skip


def add_measuring(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of commands that measure kernels before they plan."""
    group = parser.add_argument_group("measuring (where this machine has the GPU that is planned for)")
    group.add_argument(
        "--measure", choices=tuple(map(str, Measure)),
        help="measure kernels before planning: those that no profile has (missing, the default), none (never; default "
        "with --profile), or all again (always)",
    )  # fmt: skip
    add_measure_for(group)


def add_measure_for(group: argparse._ActionsContainer) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add the time limit of measuring."""
    group.add_argument(
        "--measure-for", type=duration, default=math.inf, metavar="TIME",
        help="measure for at most TIME, kernels with the largest effect first: 90s, 5min, 1h (default: no limit)",
    )  # fmt: skip


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def options(arguments: argparse.Namespace, gpu: str | None = None, sharing: Sharing | None = None) -> Options:
    """Return the planning arguments as options of the compiler.

    Args:
        arguments: Parsed command line.
        gpu: Name of the GPU, in place of --gpu.
        sharing: GPUs that share a mini-batch, in place of --gpus.

    Raises:
        MbcError: MBC285, --gpus names GPUs and --gpu names one, too.
    """
    given: Sharing = getattr(arguments, "shared_by", 1)
    sharing = given if sharing is None else sharing
    if not isinstance(sharing, int) and getattr(arguments, "gpu", None) not in (None, "auto"):
        raise MbcError("MBC285", "--gpus names the GPUs already, and --gpu names one, too", "leave --gpu out")
    return Options(
        gpus=sharing if isinstance(sharing, int) else len(sharing),
        rank_gpus=() if isinstance(sharing, int) else sharing,
        gpus_per_node=getattr(arguments, "gpus_per_node", 0),
        node_link_gbit=getattr(arguments, "node_link", 0.0),
        gpu=next(name for name in (gpu, getattr(arguments, "gpu", None), "auto") if name is not None),
        settings=tuple(arguments.settings),
        network=arguments.network,
        workspace_limit_bytes=arguments.workspace_limit,
        workspace_total_bytes=arguments.workspace_total,
        policy=Policy(arguments.policy),
        micro_batch=arguments.micro_batch,
        without=frozenset(arguments.without),
        providers=tuple(arguments.providers),
        measure=Measure(getattr(arguments, "measure", None) or Measure.NEVER),
        measure_for_s=getattr(arguments, "measure_for", math.inf),
        dump_stages=getattr(arguments, "dump_stages", None),
        profile=arguments.profile,
        stale_profile=arguments.stale_profile,
        explains_gpu=not hasattr(arguments, "device"),  # commands with --device run their plans, maybe on the CPU
    )


def measuring_options(arguments: argparse.Namespace) -> Options:
    """Return the options of a command that measures missing kernel times unless --measure says otherwise."""
    given = options(arguments)
    return replace(given, measure=Measure.MISSING) if arguments.measure is None else given
