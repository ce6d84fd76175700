"""Arguments of the commands about GPUs and what was measured on them."""

from __future__ import annotations

import argparse

from mbc.cli.arguments.argument_types import count, precisions, setting, size
from mbc.cli.arguments.shared import Commands, Raw, add_json, add_measure_for, command
from mbc.options import Options, Policy

PROFILE_VERBS = ("run", "list", "diff", "merge", "ship")


def add_profile(commands: Commands) -> None:
    made = command(
        commands, "profile", "Measure kernels on this machine's GPU for plans of networks, and handle profiles.",
        "  mbc profile net.mbc                            what plans of net.mbc may use, into your own profile\n"
        "  mbc profile *.mbc --gpu all --measure-for 5min\n"
        "  mbc profile --gpu all                          collectives between the GPUs of this machine\n"
        "  mbc profile net.mbc --precision fp32,bf16 --policy all -o here.sqlite\n"
        "  mbc profile list                               what is known\n"
        "  mbc profile merge a.sqlite b.sqlite -o both.sqlite\n"
        "  mbc profile diff before.sqlite after.sqlite\n\n"
        "Interrupted, the same command goes on where it stopped. `mbc profile NET` is short for `mbc profile run NET`.",
    )  # fmt: skip
    verbs = made.add_subparsers(title="what to do", metavar="WHAT", required=True, dest="verb")
    made.set_defaults(implied=PROFILE_VERBS[0])
    _profile_run(verbs)
    made = _profile_verb(
        verbs, "list", "Say what profiles know.", "  mbc profile list\n  mbc profile list here.sqlite --json"
    )
    made.add_argument("files", nargs="*", metavar="FILE", help="default: your own profiles and the bundled ones")
    add_json(made)
    made = _profile_verb(
        verbs, "diff", "Compare two profiles.", "  mbc profile diff before.sqlite after.sqlite --limit 40"
    )
    made.add_argument("before", metavar="A")
    made.add_argument("after", metavar="B")
    made.add_argument(
        "--limit", type=count, default=20, metavar="ROWS", help="list the ROWS largest changes (default 20)"
    )
    add_json(made)
    made = _profile_verb(
        verbs, "merge", "Put profiles of one GPU and one cuDNN together; of the same kernel the newer time stays.",
        "  mbc profile merge a.sqlite b.sqlite -o both.sqlite\n  mbc profile merge mine.sqlite b.sqlite -o mine.sqlite",
    )  # fmt: skip
    made.add_argument("files", nargs="+", metavar="FILE")
    made.add_argument("-o", "--output", required=True, metavar="FILE", help="one of them, or a new file")
    add_json(made)
    made = _profile_verb(
        verbs, "ship", "Write the part of a profile that planning uses: kernels that no other one beats.",
        "  mbc profile ship here.sqlite -o h200.sqlite.gz",
    )  # fmt: skip
    made.add_argument("file", metavar="FILE")
    made.add_argument("-o", "--output", required=True, metavar="FILE")
    add_json(made)


def _profile_run(verbs: Commands) -> None:
    made = _profile_verb(
        verbs, "run", "Measure every kernel that plans of the networks may use, on this machine's GPU.",
        "  mbc profile run net.mbc --set batch=256\n  mbc profile run *.mbc --gpu all --measure-for 5min\n"
        "  mbc profile run --gpu all",
    )  # fmt: skip
    made.add_argument(
        "networks", nargs="*", metavar="NET", help="networks (.mbc); none with --gpu all: collectives only"
    )
    made.add_argument(
        "--gpu",
        default="auto",
        metavar="N",
        help="number of the GPU (mbc gpus), N@M: on M of its multiprocessors, or all, which must be alike: also"
        " collectives between them (default: 0)",
    )
    made.add_argument(
        "--set", dest="settings", action="append", default=[], type=setting, metavar="NAME=VALUE",
        help="set a parameter of the networks or of a section, as batch=64; may be repeated",
    )  # fmt: skip
    made.add_argument("--network", help="which network, of a source that has several")
    made.add_argument(
        "--policy", choices=tuple(map(str, Policy)), default=str(Options().policy),
        help="micro-batch sizes that plans may use (default %(default)s)",
    )  # fmt: skip
    made.add_argument(
        "--precision",
        type=precisions,
        default=(),
        metavar="P,P",
        help="fp32, tf32, bf16, fp16 (default: the networks')",
    )
    made.add_argument("--workspace-limit", type=size, metavar="SIZE", help="leave out kernels that need more workspace")
    add_measure_for(made)
    made.set_defaults(wrong=made.error)  # ends the process
    made.add_argument("--again", action="store_true", help="measure also what the profile knows")
    made.add_argument("-o", "--output", metavar="FILE", help="profile to add to (default: your own of this GPU)")
    add_json(made)


def _profile_verb(verbs: Commands, name: str, short: str, examples: str) -> argparse.ArgumentParser:
    return verbs.add_parser(name, help=short, description=short, epilog=f"examples:\n{examples}", formatter_class=Raw)


def add_gpus(commands: Commands) -> None:
    made = command(commands, "gpus", "List the GPUs that can be planned for, and those of this machine.", "  mbc gpus")
    add_json(made)


def add_doctor(commands: Commands) -> None:
    made = command(
        commands, "doctor", "Say what of the GPU software is here, what each missing part costs and how to get it.",
        "  mbc doctor\n  mbc doctor --json",
    )  # fmt: skip
    add_json(made)
