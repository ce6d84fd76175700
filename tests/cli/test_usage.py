"""Help, wrong usage and exit codes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from mbc.cli import main
from mbc.errors import MbcError
from mbc.hardware.spec import find_spec
from mbc.version import __version__

COMMANDS = ("compile", "show", "report", "trace", "verify", "check", "diff", "train", "profile", "gpus", "doctor")
COMMANDS += ("fmt", "nnunet", "completions", "lsp")


def _exit(*arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


def test_help_lists_every_command(capsys):
    assert _exit("--help") == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^    {command}\b", text, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_examples(capsys, command):
    assert _exit(command, "--help") == 0
    text = capsys.readouterr().out
    assert f"examples:\n  mbc {command}" in text
    assert "default: None" not in text


def test_nothing_asked_for_is_helped(capsys):
    assert _exit() == 0
    assert "commands:" in capsys.readouterr().out


def test_version(capsys):
    assert _exit("--version") == 0
    assert capsys.readouterr().out == f"mbc {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("complie", "a.mbc"), "there is no command 'complie'\nhelp: did you mean compile?\n"),
        (("compile", "a.mbc", "--polcy", "all"), "there is no option --polcy\nhelp: did you mean --policy?\n"),
        (
            ("compile", "a.mbc", "--memory", "8GB"),
            "no option --memory\nhelp: write --set memory.device=8GB, for instance\n",
        ),
        (("diff", "a.mbc", "--batch=2"), "there is no option --batch\nhelp: write --set batch=64, for instance\n"),
        (("compile", "a.mbc", "--policy=al"), "'al' is none of undivided, power_of_two, all\nhelp: did you mean all?"),
        (("compile", "a.mbc", "b.mbc"), "nothing is expected where 'b.mbc' stands\nhelp: mbc compile --help says"),
        (("compile",), "required: source"),
        (("compile", "a.mbc", "--set", "batch"), "'batch' is not NAME=VALUE"),
        (("compile", "a.mbc", "--set", "=3"), "'=3' is not NAME=VALUE"),
        (("compile", "a.mbc", "--workspace-limit", "much"), "'much' is not a size: write 64MiB"),
        (("fit", "a.mbc", "--memory", "12"), "'12' has no unit: write 12GB (10^9 bytes), 12MiB (2^20) or 12B"),
        (("check", "a.mbc", "--tolerance", "-1"), "'-1' is not a number of at least 0, such as 1e-5"),
        (("check", "a.mbc", "--tolerance", "nan"), "'nan' is not a number of at least 0"),
        (("compile", "a.mbc", "--measure", "perhaps"), "'perhaps' is none of missing, never, always"),
        (("compile", "a.mbc", "--measure-for", "long"), "'long' is not a duration: write 90s, 5min"),
        (("profile",), "required: WHAT"),
        (("profile", "merge", "a.sqlite"), "required: -o/--output"),
        (("profile", "a.mbc", "--precision", "fp32,int8"), "'int8' is none of fp32, tf32, bf16, fp16"),
        (("train", "a.mbc"), "required: --data"),
        (("train", "a.mbc", "--data", "d", "--milestones", "3,x"), "'3,x' is no list of numbers, such as 30,60,80"),
        (("train", "a.mbc", "--data", "d", "--epochs", "0"), "'0' is not a whole number above 0"),
        (("train", "a.mbc", "--data", "d", "--seed", "-1"), "--seed"),
    ],
)
def test_wrong_usage_is_exit_code_2(capsys, arguments, message):
    assert _exit(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("mbc") and error.count("\n") == 2, "one line says what is wrong, one what to do"


def test_help_imports_nothing_heavy():
    code = (
        "import sys, mbc.cli\n"
        "try: mbc.cli.main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'numpy', 'lark', 'ortools', 'jinja2', 'pycuda'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_python_m_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "mbc.cli", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"mbc {__version__}\n"


def test_an_error_is_json_where_json_is_asked_for(mbc):
    done = mbc("show", "missing.mbc", "--json")
    assert done.code == 1 and done.err.startswith("error MBC183")
    assert done.json["error"]["code"] == "MBC183" and done.json["error"]["remedy"]
    assert not mbc("show", "missing.mbc").out


def test_python_runs_the_package():
    done = subprocess.run([sys.executable, "-m", "mbc", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("mbc ")


@pytest.mark.parametrize(("gpu", "meant"), [("h2000", "h200"), ("rtx-3091", "rtx-3090")])
def test_suggested_gpus(gpu, meant):
    with pytest.raises(MbcError) as caught:
        find_spec(gpu)
    assert caught.value.remedy.startswith(f"did you mean {meant}? Else choose one that `mbc gpus` lists")
