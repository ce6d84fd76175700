"""Arguments of the commands that make and show plans."""

from __future__ import annotations

import math

from mbc.cli.arguments.argument_types import count, duration, points, seed, size, tolerance
from mbc.cli.arguments.parser import Once
from mbc.cli.arguments.shared import (
    Commands,
    Raw,
    add_json,
    add_measuring,
    add_planning,
    add_sharing,
    add_two_sharings,
    command,
)
from mbc.ir.types import Precision

_PLANNED = "a package, a plan (.json) or a source (.mbc)"


def add_compile(commands: Commands) -> None:
    """Add `mbc compile`."""
    parser = command(
        commands, "compile", "Plan a network and build the package that trains it.",
        "  mbc compile resnet.mbc -o resnet50 --set depth=50 --set batch=256\n"
        "  mbc compile net.mbc --gpu a100-80 --set memory.device=8GB --json",
    )  # fmt: skip
    parser.add_argument("source", help="the network (.mbc)")
    parser.add_argument(
        "-o", "--output", metavar="FOLDER", help="package to write (default: named as the network, here)"
    )
    parser.add_argument("--force", action="store_true", help="replace a package that is there")
    parser.add_argument(
        "--dump-stages", metavar="FOLDER", help="write the result of every stage of the compiler, as text"
    )
    add_planning(parser)
    add_sharing(parser)
    add_measuring(parser)
    add_json(parser)


def add_show(commands: Commands) -> None:
    """Add `mbc show`."""
    parser = command(
        commands, "show", "Show a plan: kernels, times, workspace, lifetimes, peak and bounds.",
        "  mbc show resnet50               a package\n"
        "  mbc show resnet50/plan.json     a plan\n"
        "  mbc show net.mbc --gpu t4       a source, planned now\n"
        "  mbc show net.mbc --ablation     effect of offloading, recomputing, dividing and workspace\n"
        "  mbc show resnet50 --roofline --limit 20   operations furthest from the limits of the GPU",
    )  # fmt: skip
    parser.add_argument("plan", help=_PLANNED)
    parser.add_argument("--limit", type=count, metavar="ROWS", help="show the slowest ROWS operations only")
    parser.add_argument("--by-kind", action="store_true", help="one row for each kind of operation")
    parser.add_argument("--infer", action="store_true", help="the inference program instead of the training step")
    parser.add_argument(
        "--roofline", action="store_true",
        help="each operation's time against its limit (bytes over bandwidth, flops over peak), and the network's floor",
    )  # fmt: skip
    parser.add_argument(
        "--ablation", action="store_true", help="memory and time of a source with techniques left out one by one"
    )
    add_planning(parser)
    add_sharing(parser)
    add_json(parser)


def add_report(commands: Commands) -> None:
    """Add `mbc report`."""
    parser = command(
        commands, "report", "Write a plan as one HTML page: memory, streams, roofline, operations, network.",
        "  mbc report resnet50 -o resnet50.html\n"
        "  mbc report net.mbc --gpu t4\n"
        "  mbc fit net.mbc --curve --json > curve.json && mbc report net.mbc --with curve.json",
    )  # fmt: skip
    parser.add_argument("plan", help=_PLANNED)
    parser.add_argument("-o", "--output", metavar="FILE", help="page to write (default: PLAN.html, here)")
    parser.add_argument(
        "--with", dest="recorded", action="append", default=[], metavar="FILE",
        help="also show this result: output of mbc fit --json or mbc bench --json, a file of mbc train --log, or one "
        "of --record (only the last such file counts); may be repeated",
    )  # fmt: skip
    parser.add_argument("--floor", action="store_true", help="also find the floor of the network, from the profile")
    add_planning(parser)
    add_sharing(parser)


def add_trace(commands: Commands) -> None:
    """Add `mbc trace`."""
    parser = command(
        commands, "trace", "Write the predicted step of a plan as a trace for Perfetto or chrome://tracing.",
        "  mbc trace resnet50 -o resnet50.trace.json\n  mbc trace net.mbc --gpu t4",
    )  # fmt: skip
    parser.add_argument("plan", help=_PLANNED)
    parser.add_argument("-o", "--output", metavar="FILE", help="trace to write (default: PLAN.trace.json, here)")
    parser.add_argument(
        "--with", dest="recorded", metavar="FILE", help="also show the measured step that mbc train --record wrote"
    )
    add_planning(parser)
    add_sharing(parser)


def add_fit(commands: Commands) -> None:
    """Add `mbc fit`."""
    parser = command(
        commands, "fit", "Find the largest batch that trains within a memory budget, or the step time over the budget.",
        "  mbc fit resnet.mbc --memory 12GB                 the largest batch, and images/s over the batch\n"
        "  mbc fit resnet.mbc --memory 12GB --multiple 8    try multiples of 8 only\n"
        "  mbc fit resnet.mbc --memory 12GB --search-for 10min   the exact largest batch, or the best so far\n"
        "  mbc fit resnet.mbc --memory 12GB --gpus 2        the largest batch for two such GPUs\n"
        "  mbc fit resnet.mbc --curve --set batch=128       time over budget, at one batch\n\n"
        "Every figure comes from a complete plan. Times with ~ are estimates (mbc profile measures them).",
    )  # fmt: skip
    parser.add_argument("source", metavar="NET", help="the network (.mbc)")
    parser.add_argument(
        "--memory", type=size, metavar="SIZE", help="the budget (default: the network's memory.device, or the GPU's)"
    )
    parser.add_argument(
        "--precision", choices=tuple(map(str, Precision)), help="(default: the network's train.precision)"
    )
    parser.add_argument(
        "--gpus", dest="shared_by", type=count, default=1, action=Once, metavar="N",
        help="N GPUs share the mini-batch, each within the budget: batch counts the rows of all, in multiples of N"
        " (default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--multiple", type=count, default=1, metavar="ROWS", help="try multiples of ROWS only (default 1)"
    )
    parser.add_argument(
        "--curve", action="store_true",
        help="time over budget instead, from the lower bound of all plans to the memory of the fastest plan",
    )  # fmt: skip
    parser.add_argument("--points", type=points, default=8, metavar="N", help="budgets of --curve (default 8)")
    parser.add_argument(
        "--search-for", type=duration, default=math.inf, metavar="TIME",
        help="search for the exact largest batch, for at most TIME (90s, 5min); then print the results so far (default:"
        " end once a batch fits and an eighth more rows are predicted not to)",
    )  # fmt: skip
    add_planning(parser)
    add_json(parser)


def add_nnunet(commands: Commands) -> None:
    """Add `mbc nnunet` and its subcommand."""
    parser = command(
        commands, "nnunet", "Predict which configurations of nnU-Net train on a GPU within a memory budget.",
        "  mbc nnunet plan nnUNetPlans.json --memory 11GB --gpu rtx-3090",
    )  # fmt: skip
    verbs: Commands = parser.add_subparsers(title="what to do", metavar="WHAT", required=True, dest="verb")
    short = "Predict the step, the epoch and the least memory of each configuration of plans files."
    parser = verbs.add_parser(
        "plan", help=short, description=short, formatter_class=Raw,
        epilog="examples:\n  mbc nnunet plan nnUNetPlans.json --memory 11GB --gpu rtx-3090\n"
        "  mbc nnunet plan nnUNet*Plans.json --configuration 3d_fullres --largest patch\n\n"
        "After Ctrl-C the results so far are printed.",
    )  # fmt: skip
    parser.add_argument("plans", nargs="+", metavar="PLANS", help="plans files of nnU-Net 2 (nnUNetPlans.json)")
    parser.add_argument("--memory", type=size, metavar="SIZE", help="the budget (default: the GPU's memory)")
    parser.add_argument(
        "--configuration", dest="configurations", action="append", default=[], metavar="NAME",
        help="a configuration, such as 3d_fullres; may be repeated (default: all)",
    )  # fmt: skip
    parser.add_argument("--dataset", metavar="FILE", help="nnU-Net's dataset.json (default: the one beside PLANS)")
    parser.add_argument("--channels", type=count, metavar="N", help="channels of an image, in place of the data set's")
    parser.add_argument("--classes", type=count, metavar="N", help="classes or regions, in place of the data set's")
    parser.add_argument("--largest", choices=("patch", "batch"), help="also find the largest patch or batch that fits")
    parser.add_argument("--quick", action="store_true", help="do not search the least memory, which takes minutes")
    add_planning(parser)
    add_json(parser)


def add_place(commands: Commands) -> None:
    """Add `mbc place`."""
    parser = command(
        commands, "place", "Place blocks of memory that live for a while, in the smallest height that is found.",
        "  mbc place blocks.csv -o placed.csv\n"
        "  mbc place blocks.csv --capacity 1048576      any placement within this height\n\n"
        "The files have minimalloc's format: id,lower,upper,size with an optional alignment; the result adds offset.",
    )  # fmt: skip
    parser.add_argument("blocks", metavar="FILE", help="the blocks (.csv)")
    parser.add_argument(
        "--capacity", type=count, metavar="N", help="the height that is enough (default: as low as is found)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="file to write (default: stdout)")


def add_verify(commands: Commands) -> None:
    """Add `mbc verify`."""
    parser = command(
        commands, "verify", "Prove that a plan computes what its graph says, by running it symbolically.",
        "  mbc verify resnet50\n  mbc verify resnet50/plan.json --json",
    )  # fmt: skip
    parser.add_argument("plan", help="a package or a plan (.json)")
    parser.add_argument(
        "--profile", metavar="FILE",
        help="measurements to check workspaces with (default: your own of the plan's GPU, and the bundled ones)",
    )  # fmt: skip
    add_json(parser)


def add_check(commands: Commands) -> None:
    """Add `mbc check`."""
    parser = command(
        commands, "check", "Compare a network divided into micro-batches and undivided, or each launch with float64.",
        "  mbc check net.mbc --workspace-limit 64MiB\n"
        "  mbc check net.mbc --micro-batch 8 --set batch=32 --limit 10\n"
        "  mbc check net.mbc --micro-batch 8 --operations\n"
        "  mbc check resnet50/ --launches\n\n"
        "The rule: the error of a tensor of the divided step may be twice the error of the undivided step, plus a\n"
        "floor that depends on the precision. The error is the distance |a - b| / |b| from a step in float64, where\n"
        "NumPy can run one. Else it is the distance from the undivided step, and the error of that step is its change\n"
        "when weights are perturbed by the rounding error of one kernel call. Exit code 1 if a tensor breaks the rule.",
    )  # fmt: skip
    parser.add_argument("source", metavar="NET", help="the network (.mbc); with --launches a plan or package, too")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--operations", action="store_true", help="compare each divided operation by itself, on random operands"
    )
    what.add_argument(
        "--launches", action="store_true",
        help="compare every launch of the plan with float64, on its input values in a real step",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=count, default=2, metavar="N",
        help="with --launches: check the Nth step, in which states differ from their initial values (default 2)",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto: a GPU where there is one)"
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of weights, inputs and dropout (default 0)")
    parser.add_argument(
        "--reference", choices=("float64", "perturbed"),
        help="reference for both steps (default: float64 where the step is small enough)",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", type=tolerance, metavar="X",
        help="largest allowed |a - b| / |b| between divided and undivided, in place of the rule",
    )  # fmt: skip
    parser.add_argument("--limit", type=count, metavar="ROWS", help="show the ROWS worst only")
    parser.set_defaults(refuse=parser.error)
    add_planning(parser)
    add_json(parser)


def add_diff(commands: Commands) -> None:
    """Add `mbc diff`."""
    parser = command(
        commands, "diff", "Compare two plans, or one source planned twice: for two GPUs, or two numbers of them.",
        "  mbc diff before/plan.json after/plan.json\n  mbc diff net.mbc --gpu h200 --gpu t4\n"
        "  mbc diff net.mbc --gpus 1 --gpus 2               one GPU, and two that share a mini-batch\n"
        "  mbc diff net.mbc --gpus h200,h100                unlike GPUs that share a mini-batch\n"
        "  mbc diff before after -o page.html               one page that compares both",
    )  # fmt: skip
    parser.add_argument("plans", nargs="+", metavar="PLAN", help="two packages, plans or sources; or one source")
    parser.add_argument(
        "--gpu", dest="gpus", action="append", default=[], help="GPU to plan for; twice with one source"
    )
    parser.add_argument(
        "--limit", type=count, default=20, metavar="ROWS", help="list the ROWS operations that differ most (default 20)"
    )
    parser.add_argument("--times", action="store_true", help="also list operations that differ in time only")
    parser.add_argument("-o", "--output", metavar="FILE", help="write one page (.html) of both instead of printing")
    add_planning(parser, gpu=False)
    add_two_sharings(parser)
    add_json(parser)
