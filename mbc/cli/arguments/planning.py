"""Arguments of the commands that make plans and look at them."""

from __future__ import annotations

from mbc.cli.arguments.argument_types import count, points, seed, size, tolerance
from mbc.cli.arguments.parser import Once
from mbc.cli.arguments.shared import (
    Commands,
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
    made = command(
        commands, "compile", "Plan a network and build the package that trains it.",
        "  mbc compile resnet.mbc -o resnet50 --set depth=50 --set batch=256\n"
        "  mbc compile net.mbc --gpu a100-80 --set memory.device=8GB --json",
    )  # fmt: skip
    made.add_argument("source", help="the network (.mbc)")
    made.add_argument("-o", "--output", metavar="FOLDER", help="package to write (default: named as the network, here)")
    made.add_argument("--force", action="store_true", help="replace a package that is there")
    made.add_argument("--dump-stages", metavar="FOLDER", help="write what every stage of the compiler made, as text")
    add_planning(made)
    add_sharing(made)
    add_measuring(made)
    add_json(made)


def add_show(commands: Commands) -> None:
    made = command(
        commands, "show", "Show a plan: kernels, times, workspace, lifetimes, peak and bounds.",
        "  mbc show resnet50               a package\n"
        "  mbc show resnet50/plan.json     a plan\n"
        "  mbc show net.mbc --gpu t4       a source, planned now\n"
        "  mbc show net.mbc --ablation     what offloading, recomputing, dividing and workspace contribute\n"
        "  mbc show resnet50 --roofline --limit 20   where the time goes beyond what the GPU needs",
    )  # fmt: skip
    made.add_argument("plan", help=_PLANNED)
    made.add_argument("--limit", type=count, metavar="ROWS", help="show the slowest ROWS operations only")
    made.add_argument("--by-kind", action="store_true", help="one row a kind of operation")
    made.add_argument("--infer", action="store_true", help="the inference program instead of the training step")
    made.add_argument(
        "--roofline", action="store_true",
        help="each operation's time against its limit (bytes over bandwidth, flops over peak), and the network's floor",
    )  # fmt: skip
    made.add_argument(
        "--ablation", action="store_true", help="memory and time of a source with techniques left out one by one"
    )
    add_planning(made)
    add_sharing(made)
    add_json(made)


def add_report(commands: Commands) -> None:
    made = command(
        commands, "report", "Write a plan as one page to look at: memory, streams, roofline, operations, network.",
        "  mbc report resnet50 -o resnet50.html\n"
        "  mbc report net.mbc --gpu t4\n"
        "  mbc fit net.mbc --curve --json > curve.json && mbc report net.mbc --with curve.json",
    )  # fmt: skip
    made.add_argument("plan", help=_PLANNED)
    made.add_argument("-o", "--output", metavar="FILE", help="page to write (default: PLAN.html, here)")
    made.add_argument(
        "--with", dest="recorded", action="append", default=[], metavar="FILE",
        help="show this beside it: what mbc fit --json or mbc bench --json printed, or what mbc train --log or "
        "mbc bench --record wrote (of these the last one); may be given again",
    )  # fmt: skip
    made.add_argument("--floor", action="store_true", help="also find the floor of the network, from the profile")
    add_planning(made)
    add_sharing(made)


def add_trace(commands: Commands) -> None:
    made = command(
        commands, "trace", "Write the predicted step of a plan as a trace for Perfetto or chrome://tracing.",
        "  mbc trace resnet50 -o resnet50.trace.json\n  mbc trace net.mbc --gpu t4",
    )  # fmt: skip
    made.add_argument("plan", help=_PLANNED)
    made.add_argument("-o", "--output", metavar="FILE", help="trace to write (default: PLAN.trace.json, here)")
    made.add_argument(
        "--with", dest="recorded", metavar="FILE", help="and the measured step that mbc train --record wrote"
    )
    add_planning(made)
    add_sharing(made)


def add_fit(commands: Commands) -> None:
    made = command(
        commands, "fit", "Find the largest batch that trains within a memory budget, or what a budget costs in time.",
        "  mbc fit resnet.mbc --memory 12GB                 the largest batch, and images/s over the batch\n"
        "  mbc fit resnet.mbc --memory 12GB --multiple 8    of the multiples of 8\n"
        "  mbc fit resnet.mbc --memory 12GB --gpus 2        the largest that two such GPUs share\n"
        "  mbc fit resnet.mbc --curve --set batch=128       time over budget, at one batch\n\n"
        "Every figure is that of a whole plan, made with the kernel times that are known (mbc profile measures more).",
    )  # fmt: skip
    made.add_argument("source", metavar="NET", help="the network (.mbc)")
    made.add_argument(
        "--memory", type=size, metavar="SIZE", help="the budget (default: the network's memory.device, or the GPU's)"
    )
    made.add_argument(
        "--precision", choices=tuple(map(str, Precision)), help="(default: the network's train.precision)"
    )
    made.add_argument(
        "--gpus", dest="shared_by", type=count, default=1, action=Once, metavar="N",
        help="N GPUs share the mini-batch, each within the budget: batch counts the rows of all, in multiples of N"
        " (default 1)",
    )  # fmt: skip
    made.add_argument(
        "--multiple", type=count, default=1, metavar="ROWS", help="try multiples of ROWS only (default 1)"
    )
    made.add_argument(
        "--curve", action="store_true",
        help="time over budget instead, from the lower bound of all plans to what the fastest one takes",
    )  # fmt: skip
    made.add_argument("--points", type=points, default=8, metavar="N", help="budgets of --curve (default 8)")
    add_planning(made)
    add_json(made)


def add_verify(commands: Commands) -> None:
    made = command(
        commands, "verify", "Prove that a plan computes what its graph says, by running it symbolically.",
        "  mbc verify resnet50\n  mbc verify resnet50/plan.json --json",
    )  # fmt: skip
    made.add_argument("plan", help="a package or a plan (.json)")
    made.add_argument(
        "--profile", metavar="FILE",
        help="measurements to hold workspaces against (default: your own of the plan's GPU, and the bundled ones)",
    )  # fmt: skip
    add_json(made)


def add_check(commands: Commands) -> None:
    made = command(
        commands, "check", "Compare a network divided into micro-batches and undivided, or each launch with float64.",
        "  mbc check net.mbc --workspace-limit 64MiB\n"
        "  mbc check net.mbc --micro-batch 8 --set batch=32 --limit 10\n"
        "  mbc check net.mbc --micro-batch 8 --operations\n"
        "  mbc check resnet50/ --launches\n\n"
        "The rule: a tensor of the divided step may be wrong by twice what the undivided step is wrong by, plus a\n"
        "floor that depends on the precision. Wrong is the distance |a - b| / |b| from float64, where NumPy can run\n"
        "the step in it; else from the undivided step, which is held against itself with weights that are off by\n"
        "what one kernel call may be off. Exit code 1 where a tensor breaks the rule.",
    )  # fmt: skip
    made.add_argument("source", metavar="NET", help="the network (.mbc); with --launches a plan or package, too")
    what = made.add_mutually_exclusive_group()
    what.add_argument(
        "--operations", action="store_true", help="compare each divided operation by itself, on random operands"
    )
    what.add_argument(
        "--launches", action="store_true",
        help="hold every launch of the plan against float64, on the values that it gets in a real step",
    )  # fmt: skip
    made.add_argument(
        "--steps", type=count, default=2, metavar="N",
        help="with --launches: the step whose launches are checked, so that states are not as they start (default 2)",
    )  # fmt: skip
    made.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto: a GPU where there is one)"
    )
    made.add_argument("--seed", type=seed, default=0, help="of weights, inputs and dropout (default 0)")
    made.add_argument(
        "--reference", choices=("float64", "perturbed"),
        help="what both steps are held against (default: float64 where the step is small enough)",
    )  # fmt: skip
    made.add_argument(
        "--tolerance", type=tolerance, metavar="X",
        help="largest distance |a - b| / |b| between divided and undivided, in place of the rule",
    )  # fmt: skip
    made.add_argument("--limit", type=count, metavar="ROWS", help="show the ROWS worst only")
    made.set_defaults(refuse=made.error)
    add_planning(made)
    add_json(made)


def add_diff(commands: Commands) -> None:
    made = command(
        commands, "diff", "Compare two plans, or one source planned twice: for two GPUs, or two numbers of them.",
        "  mbc diff before/plan.json after/plan.json\n  mbc diff net.mbc --gpu h200 --gpu t4\n"
        "  mbc diff net.mbc --gpus 1 --gpus 2               one GPU, and two that share a mini-batch\n"
        "  mbc diff net.mbc --gpus h200,h100                unlike GPUs that share a mini-batch\n"
        "  mbc diff before after -o page.html               one page of both, with words on what differs",
    )  # fmt: skip
    made.add_argument("plans", nargs="+", metavar="PLAN", help="two packages, plans or sources; or one source")
    made.add_argument("--gpu", dest="gpus", action="append", default=[], help="GPU to plan for; twice with one source")
    made.add_argument(
        "--limit", type=count, default=20, metavar="ROWS", help="list the ROWS operations that differ most (default 20)"
    )
    made.add_argument("--times", action="store_true", help="list operations that differ in time only, too")
    made.add_argument("-o", "--output", metavar="FILE", help="write one page (.html) of both instead of printing")
    add_planning(made, gpu=False)
    add_two_sharings(made)
    add_json(made)
