"""Every command's arguments, help and examples. What a command does is imported when it runs: help is instant."""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from mbc import __version__
from mbc.ir.types import Precision
from mbc.options import PEERS, PROVIDER_NAMES, TECHNIQUES, Measure, Options, Policy
from mbc.units import parse_duration, parse_size

_DESCRIPTION = """\
mbc compiles the training of a convolutional network, ahead of time and under a GPU memory budget:
a network written in a .mbc file becomes a plan (every kernel, every byte, the time) and a Python package.

  mbc compile resnet.mbc --gpu h200     plan and build the package
  mbc show resnet50                     the plan as a table
  mbc train resnet50 --data train.npz   train it
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line without the program's name, parsed. Ends the process on wrong usage and on --help."""
    words = list(argv)
    if words[:1] == ["profile"] and len(words) > 1 and words[1] not in (*_PROFILE_VERBS, "-h", "--help"):
        words.insert(1, "run")  # `mbc profile NET` is what people want most often
    return parser().parse_args(words)


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; a parsed result has `run`, which takes it and returns the exit code."""
    top = argparse.ArgumentParser(prog="mbc", description=_DESCRIPTION, formatter_class=_Raw)
    top.add_argument("--version", action="version", version=f"mbc {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_compile, _show, _fit, _verify, _check, _diff, _train, _bench, _profile, _gpus, _doctor):
        add(commands)
    return top


class _Raw(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of examples."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)


class _Commands(Protocol):
    """What argparse's add_subparsers gives."""

    def add_parser(
        self, name: str, *, help: str, description: str, epilog: str, formatter_class: type[argparse.HelpFormatter]
    ) -> argparse.ArgumentParser: ...


def _command(commands: _Commands, name: str, short: str, examples: str) -> argparse.ArgumentParser:
    made = commands.add_parser(
        name, help=short, description=short, epilog=f"examples:\n{examples}", formatter_class=_Raw
    )
    made.set_defaults(run=_later(name))
    return made


def _later(name: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        return importlib.import_module(f"mbc.cli.{name}_command").run(arguments)

    return run


def _planning(made: argparse.ArgumentParser, gpu: bool = True) -> None:
    """Arguments of whatever may have to plan."""
    group = made.add_argument_group("planning (of a .mbc source)")
    if gpu:
        group.add_argument(
            "--gpu", default="auto", help="GPU to plan for (see mbc gpus); default: this machine's, else h200"
        )
    group.add_argument(
        "--set", dest="settings", action="append", default=[], type=_setting, metavar="NAME=VALUE",
        help="set a parameter of the network or of a section, as batch=64 or memory.device=8GB; may be repeated",
    )  # fmt: skip
    group.add_argument("--network", help="which network, of a source that has several")
    group.add_argument(
        "--policy", choices=tuple(map(str, Policy)), default=str(Options().policy),
        help="micro-batch sizes that an operation may be divided into (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--micro-batch", type=_count, default=0, metavar="ROWS",
        help="divide every convolution into kernel calls of so many rows (default: choose)",
    )  # fmt: skip
    group.add_argument(
        "--without", type=_techniques, action="extend", default=[], metavar="T,T",
        help=f"leave techniques out, of {', '.join(TECHNIQUES)} (see mbc show --staircase)",
    )  # fmt: skip
    group.add_argument(
        "--workspace-limit", type=_size, metavar="SIZE",
        help="most workspace for one operation (default: what the budget leaves free at its moment)",
    )  # fmt: skip
    group.add_argument(
        "--workspace-total", type=_size, metavar="SIZE",
        help="workspace that all operations share out, each its own part",
    )  # fmt: skip
    group.add_argument(
        "--provider", dest="providers", action="append", default=[], choices=PROVIDER_NAMES,
        help="source of kernels that may be used; may be repeated (default: all)",
    )  # fmt: skip
    group.add_argument(
        "--profile", metavar="FILE",
        help="measured kernel times to plan with (default: your own of this GPU, and those shipped with mbc)",
    )  # fmt: skip
    group.add_argument(
        "--stale-profile",
        action="store_true",
        help="take the times of a --profile of another GPU or cuDNN as estimates",
    )


def _measuring(made: argparse.ArgumentParser) -> None:
    """Arguments of whatever measures before it plans."""
    group = made.add_argument_group("measuring (where this machine has the GPU that is planned for)")
    group.add_argument(
        "--measure", choices=tuple(map(str, Measure)),
        help="measure kernels before planning: what no profile knows (missing, the default), nothing (never; so with "
        "--profile), or everything again (always)",
    )  # fmt: skip
    _measure_for(group)


def _measure_for(group: argparse._ActionsContainer) -> None:  # pyright: ignore[reportPrivateUsage]
    group.add_argument(
        "--measure-for", type=_duration, default=math.inf, metavar="TIME",
        help="measure for so long at most, what is worth most first: 90s, 5min, 1h (default: until all is measured)",
    )  # fmt: skip


def options(arguments: argparse.Namespace, gpu: str | None = None) -> Options:
    """The planning arguments as the compiler takes them."""
    return Options(
        gpu=gpu or getattr(arguments, "gpu", None) or "auto",
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
    )


def measuring_options(arguments: argparse.Namespace) -> Options:
    """`options` of a command that measures what is missing unless it is told otherwise."""
    told = options(arguments)
    return replace(told, measure=Measure.MISSING) if arguments.measure is None else told


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and name.strip() and value.strip()):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE")
    return name.strip(), value.strip()


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _techniques(text: str) -> frozenset[str]:
    asked = frozenset(part.strip() for part in text.split(","))
    wrong = sorted(asked - set(TECHNIQUES))
    if wrong:
        raise argparse.ArgumentTypeError(f"'{wrong[0]}' is none of {', '.join(TECHNIQUES)}")
    return asked


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def _points(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 1")
    return int(text)


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of at least 0, such as 1e-5")
    return value


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0 to 2^63 - 1")
    return int(text)


def _json(made: argparse.ArgumentParser) -> None:
    made.add_argument("--json", action="store_true", help="print the result as JSON")


def _compile(commands: _Commands) -> None:
    made = _command(
        commands, "compile", "Plan a network and build the package that trains it.",
        "  mbc compile resnet.mbc -o resnet50 --set depth=50 --set batch=256\n"
        "  mbc compile net.mbc --gpu a100-80 --set memory.device=8GB --json",
    )  # fmt: skip
    made.add_argument("source", help="the network (.mbc)")
    made.add_argument("-o", "--output", metavar="FOLDER", help="package to write (default: named as the network, here)")
    made.add_argument("--force", action="store_true", help="replace a package that is there")
    made.add_argument("--dump-stages", metavar="FOLDER", help="write what every stage of the compiler made, as text")
    _planning(made)
    _measuring(made)
    _json(made)


def _show(commands: _Commands) -> None:
    made = _command(
        commands, "show", "Show a plan: kernels, times, workspace, lifetimes, peak and bounds.",
        "  mbc show resnet50               a package\n"
        "  mbc show resnet50/plan.json     a plan\n"
        "  mbc show net.mbc --gpu t4       a source, planned now\n"
        "  mbc show net.mbc --staircase    what offloading, recomputing, dividing and workspace contribute\n"
        "  mbc show resnet50 --roofline --limit 20   where the time goes beyond what the GPU needs",
    )  # fmt: skip
    made.add_argument("plan", help="a package, a plan (.json) or a source (.mbc)")
    made.add_argument("--limit", type=_count, metavar="ROWS", help="show the slowest ROWS operations only")
    made.add_argument("--by-kind", action="store_true", help="one row a kind of operation")
    made.add_argument("--infer", action="store_true", help="the inference program instead of the training step")
    made.add_argument(
        "--roofline", action="store_true",
        help="each operation's time beside its limit (bytes over bandwidth, flops over peak), and the network's floor",
    )  # fmt: skip
    made.add_argument(
        "--staircase", action="store_true", help="memory and time of a source with techniques left out one by one"
    )
    _planning(made)
    _json(made)


def _fit(commands: _Commands) -> None:
    made = _command(
        commands, "fit", "Find the largest batch that trains within a memory budget, or what a budget costs in time.",
        "  mbc fit resnet.mbc --memory 12GB                 the largest batch, and images/s over the batch\n"
        "  mbc fit resnet.mbc --memory 12GB --multiple 8    of the multiples of 8\n"
        "  mbc fit resnet.mbc --curve --set batch=128       time over budget, at one batch\n\n"
        "Every figure is that of a whole plan, made with the kernel times that are known (mbc profile measures more).",
    )  # fmt: skip
    made.add_argument("source", metavar="NET", help="the network (.mbc)")
    made.add_argument(
        "--memory", type=_size, metavar="SIZE", help="the budget (default: the network's memory.device, or the GPU's)"
    )
    made.add_argument(
        "--precision", choices=tuple(map(str, Precision)), help="(default: the network's train.precision)"
    )
    made.add_argument(
        "--multiple", type=_count, default=1, metavar="ROWS", help="try multiples of ROWS only (default 1)"
    )
    made.add_argument(
        "--curve", action="store_true",
        help="time over budget instead, from the least that any plan takes to what the fastest one does",
    )  # fmt: skip
    made.add_argument("--points", type=_points, default=8, metavar="N", help="budgets of --curve (default 8)")
    _planning(made)
    _json(made)


def _verify(commands: _Commands) -> None:
    made = _command(
        commands, "verify", "Prove that a plan computes what its graph says, by running it symbolically.",
        "  mbc verify resnet50\n  mbc verify resnet50/plan.json --json",
    )  # fmt: skip
    made.add_argument("plan", help="a package or a plan (.json)")
    _json(made)


def _check(commands: _Commands) -> None:
    made = _command(
        commands, "check", "Run a network divided into micro-batches and undivided, and compare what comes out.",
        "  mbc check net.mbc --workspace-limit 64MiB\n"
        "  mbc check net.mbc --micro-batch 8 --set batch=32 --limit 10\n"
        "  mbc check net.mbc --micro-batch 8 --operations\n\n"
        "The rule: a tensor of the divided step may be wrong by twice what the undivided step is wrong by, plus a\n"
        "floor that depends on the precision. Wrong is the distance |a - b| / |b| from float64, where NumPy can run\n"
        "the step in it; else from the undivided step, which is held against itself with weights that are off by\n"
        "what one kernel call may be off. Exit code 1 where a tensor breaks the rule.",
    )  # fmt: skip
    made.add_argument("source", metavar="NET", help="the network (.mbc)")
    made.add_argument(
        "--operations", action="store_true", help="compare each divided operation by itself, on random operands"
    )
    made.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto: a GPU where there is one)"
    )
    made.add_argument("--seed", type=_seed, default=0, help="of weights, inputs and dropout (default 0)")
    made.add_argument(
        "--reference", choices=("float64", "perturbed"),
        help="what both steps are held against (default: float64 where the step is small enough)",
    )  # fmt: skip
    made.add_argument(
        "--tolerance", type=_tolerance, metavar="X",
        help="largest distance |a - b| / |b| between divided and undivided, in place of the rule",
    )  # fmt: skip
    made.add_argument("--limit", type=_count, metavar="ROWS", help="show the ROWS worst only")
    _planning(made)
    _json(made)


def _diff(commands: _Commands) -> None:
    made = _command(
        commands, "diff", "Compare two plans, or one source planned for two GPUs.",
        "  mbc diff before/plan.json after/plan.json\n  mbc diff net.mbc --gpu h200 --gpu t4",
    )  # fmt: skip
    made.add_argument("plans", nargs="+", metavar="PLAN", help="two packages, plans or sources; or one source")
    made.add_argument("--gpu", dest="gpus", action="append", default=[], help="GPU to plan for; twice with one source")
    made.add_argument("--limit", type=_count, metavar="ROWS", help="list the ROWS operations that differ most only")
    made.add_argument("--times", action="store_true", help="list operations that differ in time only, too")
    _planning(made, gpu=False)
    _json(made)


def _train(commands: _Commands) -> None:
    made = _command(
        commands, "train", "Train a network on data; a source is planned first, and built where there is a GPU.",
        "  mbc train net.mbc --data train.npz --test test.npz --epochs 20 --lr 0.1 --schedule cosine\n"
        "  mbc train resnet50 --data folder_of_npy --checkpoint resnet50.safetensors\n"
        "  mbc train resnet50 --data loader:batches --resume resnet50.safetensors",
    )  # fmt: skip
    made.add_argument("network_or_package", metavar="NET", help="a package or a source (.mbc)")
    made.add_argument(
        "--data", required=True, metavar="DATA",
        help="an .npz or a folder of .npy with an array named like each input (or x and y, images and labels), "
        "or module:function that yields batches",
    )  # fmt: skip
    made.add_argument("--test", metavar="DATA", help="data to test on after each epoch")
    made.add_argument("--epochs", type=_count, default=10, help="in all, those before --resume included (default 10)")
    made.add_argument("--lr", type=float, default=0.1, metavar="RATE", help="(peak) learning rate (default 0.1)")
    made.add_argument(
        "--schedule", choices=("constant", "cosine", "step"), default="constant", help="(default constant)"
    )
    made.add_argument("--warmup", type=float, default=0.0, metavar="EPOCHS", help="grow the rate from 0 over EPOCHS")
    made.add_argument(
        "--step-epochs", type=float, default=30.0, metavar="EPOCHS", help="schedule step: how often (default 30)"
    )
    made.add_argument(
        "--step-factor", type=float, default=0.1, metavar="FACTOR", help="schedule step: times what (default 0.1)"
    )
    made.add_argument("--seed", type=_seed, help="of initial weights, shuffling and dropout (default 0)")
    made.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto: a GPU where it can)"
    )
    made.add_argument("--checkpoint", metavar="FILE", help="write weights and progress here after each epoch")
    made.add_argument("--resume", metavar="FILE", help="go on from such a file; keeps writing to it by default")
    made.add_argument("-o", "--output", metavar="FOLDER", help="package to write when a source is built")
    _planning(made)
    _measuring(made)
    _json(made)


def _bench(commands: _Commands) -> None:
    made = _command(
        commands, "bench", "Time a training step of mbc and of others in one run, on the same data and mathematics.",
        "  mbc bench resnet.mbc --set depth=50 --set batch=256 --set train.precision=bf16\n"
        "  mbc bench net.mbc --against torch,jax -o net.bench.json\n\n"
        "Each contender runs in a process of its own, one after the other; mbc runs first and last. All start from\n"
        "the same weights, and the losses of their first steps are compared: exit code 1 where they differ. Of each\n"
        "peer every setting that may be its best is tried (channels_last, cudnn.benchmark, fused optimizers, CUDA\n"
        "graphs, the modes of torch.compile), and the fastest counts. A peer that is not installed is said so.",
    )  # fmt: skip
    made.add_argument("source", metavar="NET", help="the network (.mbc)")
    made.add_argument("--against", type=_peers, default=PEERS, metavar="P,P", help=f"peers (default {','.join(PEERS)})")
    made.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto: a GPU where there is one)"
    )
    made.add_argument("--seed", type=_seed, default=0, help="of weights, inputs and dropout (default 0)")
    made.add_argument(
        "--blocks", type=_blocks, default=20, metavar="N", help="blocks of steps; their median counts (default 20)"
    )
    made.add_argument(
        "--block", type=_duration, default=0.2, metavar="TIME", help="least duration of a block (default 0.2s)"
    )
    made.add_argument(
        "--most", type=_duration, default=1800.0, metavar="TIME", help="give up on a contender then (default 30min)"
    )
    made.add_argument("-o", "--output", metavar="FILE", help="write everything as JSON here, too")
    _planning(made)
    _measuring(made)
    _json(made)


_PROFILE_VERBS = ("run", "list", "diff", "merge", "ship")


def _profile(commands: _Commands) -> None:
    made = _command(
        commands, "profile", "Measure kernels on this machine's GPU for plans of networks, and handle profiles.",
        "  mbc profile net.mbc                            what plans of net.mbc may use, into your own profile\n"
        "  mbc profile *.mbc --gpu all --measure-for 5min\n"
        "  mbc profile net.mbc --precision fp32,bf16 --policy all -o here.sqlite\n"
        "  mbc profile list                               what is known\n"
        "  mbc profile merge a.sqlite b.sqlite -o both.sqlite\n"
        "  mbc profile diff before.sqlite after.sqlite\n\n"
        "Interrupted, the same command goes on where it stopped. `mbc profile NET` is short for `mbc profile run NET`.",
    )  # fmt: skip
    verbs = made.add_subparsers(title="what to do", metavar="WHAT", required=True, dest="verb")
    _profile_run(verbs)
    made = _profile_verb(
        verbs, "list", "Say what profiles know.", "  mbc profile list\n  mbc profile list here.sqlite --json"
    )
    made.add_argument("files", nargs="*", metavar="FILE", help="default: your own profiles and those shipped with mbc")
    _json(made)
    made = _profile_verb(
        verbs, "diff", "Compare two profiles.", "  mbc profile diff before.sqlite after.sqlite --limit 40"
    )
    made.add_argument("before", metavar="A")
    made.add_argument("after", metavar="B")
    made.add_argument(
        "--limit", type=_count, default=20, metavar="ROWS", help="list the ROWS largest changes (default 20)"
    )
    _json(made)
    made = _profile_verb(
        verbs, "merge", "Put profiles of one GPU and one cuDNN together; of the same kernel the newer time stays.",
        "  mbc profile merge a.sqlite b.sqlite -o both.sqlite\n  mbc profile merge mine.sqlite b.sqlite -o mine.sqlite",
    )  # fmt: skip
    made.add_argument("files", nargs="+", metavar="FILE")
    made.add_argument("-o", "--output", required=True, metavar="FILE", help="one of them, or a new file")
    _json(made)
    made = _profile_verb(
        verbs, "ship", "Write the part of a profile that planning uses: kernels that no other one beats.",
        "  mbc profile ship here.sqlite -o h200.sqlite",
    )  # fmt: skip
    made.add_argument("file", metavar="FILE")
    made.add_argument("-o", "--output", required=True, metavar="FILE")
    _json(made)


def _profile_run(verbs: _Commands) -> None:
    made = _profile_verb(
        verbs, "run", "Measure every kernel that plans of the networks may use, on this machine's GPU.",
        "  mbc profile run net.mbc --set batch=256\n  mbc profile run *.mbc --gpu all --measure-for 5min",
    )  # fmt: skip
    made.add_argument("networks", nargs="+", metavar="NET", help="networks (.mbc)")
    made.add_argument(
        "--gpu",
        default="auto",
        metavar="N",
        help="number of the GPU (mbc gpus), or all, which must be alike (default: 0)",
    )
    made.add_argument(
        "--set", dest="settings", action="append", default=[], type=_setting, metavar="NAME=VALUE",
        help="set a parameter of the networks or of a section, as batch=64; may be repeated",
    )  # fmt: skip
    made.add_argument("--network", help="which network, of a source that has several")
    made.add_argument(
        "--policy", choices=tuple(map(str, Policy)), default=str(Options().policy),
        help="micro-batch sizes that plans may use (default %(default)s)",
    )  # fmt: skip
    made.add_argument(
        "--precision",
        type=_precisions,
        default=(),
        metavar="P,P",
        help="fp32, tf32, bf16, fp16 (default: the networks')",
    )
    made.add_argument(
        "--workspace-limit", type=_size, metavar="SIZE", help="leave out kernels that need more workspace"
    )
    _measure_for(made)
    made.add_argument("--again", action="store_true", help="measure also what the profile knows")
    made.add_argument("-o", "--output", metavar="FILE", help="profile to add to (default: your own of this GPU)")
    _json(made)


def _profile_verb(verbs: _Commands, name: str, short: str, examples: str) -> argparse.ArgumentParser:
    return verbs.add_parser(name, help=short, description=short, epilog=f"examples:\n{examples}", formatter_class=_Raw)


def _peers(text: str) -> tuple[str, ...]:
    asked = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    wrong = [part for part in asked if part not in PEERS]
    if wrong:
        raise argparse.ArgumentTypeError(f"'{wrong[0]}' is none of {', '.join(PEERS)}")
    return asked


def _blocks(text: str) -> int:
    count = _count(text)
    if count < 2:
        raise argparse.ArgumentTypeError("a median and its spread take at least 2 blocks")
    return count


def _precisions(text: str) -> tuple[str, ...]:
    known = ("fp32", "tf32", "bf16", "fp16")
    asked = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    wrong = [part for part in asked if part not in known]
    if wrong:
        raise argparse.ArgumentTypeError(f"'{wrong[0]}' is none of {', '.join(known)}")
    return asked


def _gpus(commands: _Commands) -> None:
    made = _command(commands, "gpus", "List the GPUs that can be planned for, and those of this machine.", "  mbc gpus")
    _json(made)


def _doctor(commands: _Commands) -> None:
    made = _command(
        commands, "doctor", "Say what of the GPU software is here, what each missing part costs and how to get it.",
        "  mbc doctor\n  mbc doctor --json",
    )  # fmt: skip
    _json(made)
