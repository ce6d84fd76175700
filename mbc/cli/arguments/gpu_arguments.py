"""Arguments of the commands about GPUs and profiles."""

from __future__ import annotations

import argparse

from mbc.cli.arguments.argument_types import count, precisions, setting, size
from mbc.cli.arguments.shared import Commands, Raw, add_json, add_measure_for, command
from mbc.options import Options, Policy

PROFILE_VERBS = ("run", "list", "diff", "merge", "ship", "export", "import")


def add_profile(commands: Commands) -> None:
    """Add `mbc profile` and its subcommands."""
    parser = command(
        commands, "profile", "Measure kernels on this machine's GPU for plans of networks, and manage profiles.",
        "  mbc profile net.mbc                            kernels for net.mbc, into your own profile\n"
        "  mbc profile *.mbc --gpu all --measure-for 5min\n"
        "  mbc profile --gpu all                          collectives between the GPUs of this machine\n"
        "  mbc profile net.mbc --precision fp32,bf16 --policy all -o here.sqlite\n"
        "  mbc profile list                               contents of profiles\n"
        "  mbc profile merge a.sqlite b.sqlite -o both.sqlite\n"
        "  mbc profile diff before.sqlite after.sqlite\n\n"
        "After an interrupt, the same command continues. `mbc profile NET` is short for `mbc profile run NET`.",
    )  # fmt: skip
    verbs = parser.add_subparsers(title="what to do", metavar="WHAT", required=True, dest="verb")
    parser.set_defaults(implied=PROFILE_VERBS[0])
    _profile_run(verbs)
    parser = _profile_verb(
        verbs, "list", "List the contents of profiles.", "  mbc profile list\n  mbc profile list here.sqlite --json"
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="default: your own profiles and the bundled ones")
    add_json(parser)
    parser = _profile_verb(
        verbs, "diff", "Compare two profiles.", "  mbc profile diff before.sqlite after.sqlite --limit 40"
    )
    parser.add_argument("before", metavar="A")
    parser.add_argument("after", metavar="B")
    parser.add_argument(
        "--limit", type=count, default=20, metavar="ROWS", help="list the ROWS largest changes (default 20)"
    )
    add_json(parser)
    parser = _profile_verb(
        verbs, "merge", "Merge profiles of one GPU and one cuDNN; of two times of a kernel the newer one stays.",
        "  mbc profile merge a.sqlite b.sqlite -o both.sqlite\n  mbc profile merge mine.sqlite b.sqlite -o mine.sqlite",
    )  # fmt: skip
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="one of them, or a new file")
    add_json(parser)
    parser = _profile_verb(
        verbs, "ship", "Write the part of a profile that planning uses: kernels that no other kernel beats.",
        "  mbc profile ship here.sqlite -o h200.sqlite.gz",
    )  # fmt: skip
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("-o", "--output", required=True, metavar="FILE")
    add_json(parser)
    parser = _profile_verb(
        verbs, "export", "Write your own measurements of a GPU to a file for another machine.",
        "  mbc profile export rtx-3060.sqlite.gz\n  mbc profile export posed.sqlite.gz --gpu auto@sm_80",
    )  # fmt: skip
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--gpu", default="auto", help="name of the GPU (default: this machine's)")
    add_json(parser)
    parser = _profile_verb(
        verbs, "import", "Check a profile from another machine, and add it to your own of its GPU.",
        "  mbc profile import rtx-3060.sqlite.gz\n\n"
        "Plans for this GPU then use its times. Of two times of a kernel the newer one stays.",
    )  # fmt: skip
    parser.add_argument("file", metavar="FILE")
    add_json(parser)


def _profile_run(verbs: Commands) -> None:
    parser = _profile_verb(
        verbs, "run", "Measure every kernel that plans of the networks may use, on this machine's GPU.",
        "  mbc profile run net.mbc --set batch=256\n  mbc profile run *.mbc --gpu all --measure-for 5min\n"
        "  mbc profile run --gpu all",
    )  # fmt: skip
    parser.add_argument(
        "networks", nargs="*", metavar="NET", help="networks (.mbc); none with --gpu all: collectives only"
    )
    parser.add_argument(
        "--gpu",
        default="auto",
        metavar="N",
        help="number of the GPU (mbc gpus), N@M: on M of its multiprocessors, N@sm_80: as which it poses, or all GPUs,"
        " of one model: this also measures collectives between them (default: 0)",
    )
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], type=setting, metavar="NAME=VALUE",
        help="set a parameter of the networks or of a section, such as batch=64; may be repeated",
    )  # fmt: skip
    parser.add_argument("--network", help="name of the network, where the source has several")
    parser.add_argument(
        "--policy", choices=tuple(map(str, Policy)), default=str(Options().policy),
        help="micro-batch sizes that plans may use (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--precision",
        type=precisions,
        default=(),
        metavar="P,P",
        help="fp32, tf32, bf16, fp16 (default: the networks')",
    )
    parser.add_argument(
        "--workspace-limit", type=size, metavar="SIZE", help="leave out kernels that need more workspace"
    )
    add_measure_for(parser)
    parser.set_defaults(wrong=parser.error)  # ends the process
    parser.add_argument("--again", action="store_true", help="also measure kernels that are in the profile")
    parser.add_argument("-o", "--output", metavar="FILE", help="profile to add to (default: your own of this GPU)")
    add_json(parser)


def _profile_verb(verbs: Commands, name: str, short: str, examples: str) -> argparse.ArgumentParser:
    return verbs.add_parser(name, help=short, description=short, epilog=f"examples:\n{examples}", formatter_class=Raw)


def add_gpus(commands: Commands) -> None:
    """Add `mbc gpus`."""
    parser = command(
        commands, "gpus", "List the GPUs that can be planned for, and those of this machine.",
        "  mbc gpus\n  mbc gpus 'RTX 3060'\n  mbc gpus rtx-3060 --json > card.json\n  mbc gpus card.json\n"
        "  mbc gpus h200@sm_86",
    )  # fmt: skip
    parser.add_argument(
        "card", nargs="?", metavar="NAME",
        help="show the figures of this GPU, their sources and the limits that plans use; takes what --gpu takes; "
        "with --json as a file for --gpu",
    )  # fmt: skip
    add_json(parser)


def add_doctor(commands: Commands) -> None:
    """Add `mbc doctor`."""
    parser = command(
        commands, "doctor", "List the GPU software of this machine, the cost of each missing part and how to get it.",
        "  mbc doctor\n  mbc doctor --json",
    )  # fmt: skip
    add_json(parser)
