"""Arguments, help and examples of every command.

The module of a command is imported only when it runs, so help is fast.

* `shared`: arguments that several commands share, and the options that they set
* `described`: a parser as plain data
* `editing`: commands for people who write sources
* `interchange`: commands that read and write other frameworks' files
* `gpu_arguments`: commands about GPUs and profiles
* `planning`: commands that make and show plans
* `running`: commands that run training steps
* `predicting`: `mbc predict`
* `tuning`: `mbc tune`
* `settings_file`: options of a training that are read from a file
* `parser`: argparse with short errors
* `argument_types`: types of arguments, each with a message that says what is expected
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mbc.cli.arguments.editing import add_completions, add_fmt, add_lsp
from mbc.cli.arguments.gpu_arguments import PROFILE_VERBS, add_doctor, add_gpus, add_profile
from mbc.cli.arguments.interchange import add_export, add_import
from mbc.cli.arguments.parser import Parser
from mbc.cli.arguments.planning import (
    add_check,
    add_compile,
    add_diff,
    add_fit,
    add_nnunet,
    add_place,
    add_report,
    add_show,
    add_trace,
    add_verify,
)
from mbc.cli.arguments.predicting import add_predict
from mbc.cli.arguments.running import add_bench, add_train
from mbc.cli.arguments.shared import Raw
from mbc.cli.arguments.tuning import add_tune
from mbc.version import __version__

_COMMANDS = (
    add_compile, add_show, add_report, add_trace, add_fit, add_nnunet, add_place, add_verify, add_check, add_diff,
    add_train, add_predict, add_tune, add_import, add_export, add_fmt, add_bench, add_profile, add_gpus, add_doctor,
    add_completions, add_lsp,
)  # fmt: skip
_DESCRIPTION = """\
mbc compiles the training of a convolutional network, ahead of time and under a GPU memory budget:
a network written in a .mbc file becomes a plan (every kernel, every byte, the time) and a Python package.

  mbc compile resnet.mbc --gpu h200     plan and build the package
  mbc show resnet50                     the plan as a table
  mbc train resnet50 --data train.npz   train it
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line without the program's name; end the process on wrong usage and on --help."""
    words = list(argv) or ["--help"]
    if words[:1] == ["profile"] and len(words) > 1 and words[1] not in (*PROFILE_VERBS, "-h", "--help"):
        words.insert(1, PROFILE_VERBS[0])  # `mbc profile NET` is the most frequent use
    return parser().parse_args(words)


def parser() -> Parser:
    """Return the parser of the whole command line.

    A parsed result has a function `run`, which takes that result and returns the exit code.
    """
    top = Parser(prog="mbc", description=_DESCRIPTION, formatter_class=Raw)
    top.add_argument("--version", action="version", version=f"mbc {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in _COMMANDS:
        add(commands)
    return top
