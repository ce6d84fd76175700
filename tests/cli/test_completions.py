"""`mbc completions`: every command and option of the parsers is in each shell's script, and shells take them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from mbc.cli.arguments import parser
from mbc.cli.arguments.editing import SHELLS
from mbc.cli.completions_command import completions
from mbc.options import TECHNIQUES, Policy

BASH = """
source mbc.bash
COMP_WORDS=("$@")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_mbc
printf '%s\\n' "${COMPREPLY[@]}"
"""
COMMANDS = [command.name for command in parser().described().commands]
VERBS = ["run", "list", "diff", "merge", "ship"]
ASKED = [
    (("",), COMMANDS),
    (("comp",), ["compile", "completions"]),
    (("compile", "--pol"), ["--policy"]),
    (("compile", "--policy", ""), list(map(str, Policy))),
    (("compile", "net.mbc", "--policy", "a"), ["all"]),
    (("completions", ""), list(SHELLS)),
    (("profile", "l"), ["list"]),
    (("profile", "list", "--"), ["--help", "--json"]),
    (("profile", "net.mbc", "--ag"), ["--again"]),
    (("fmt", "--st"), ["--stdout"]),
    (("compile", "-o", ""), []),
    (("compile", "--gpu", "rtx-3060-"), ["rtx-3060-ti", "rtx-3060-8gb", "rtx-3060-laptop"]),
    (("diff", "--ti"), ["--times"]),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("completions")
    for shell in SHELLS:
        (folder / f"mbc.{shell}").write_text(completions(shell), encoding="utf-8")
    return folder


def _bash(folder: Path, words: Sequence[str]) -> list[str]:
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH, "mbc", "mbc", *words], cwd=folder, capture_output=True, text=True, check=True
    )
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(("words", "expected"), ASKED, ids=[" ".join(words) for words, _ in ASKED])
def test_bash(scripts, words: Sequence[str], expected: Sequence[str]):
    assert _bash(scripts, words) == expected


def test_bash_takes_equal_signs_and_lists(scripts):
    assert _bash(scripts, ["compile", "--policy", "=", "und"]) == ["undivided"]
    assert _bash(scripts, ["compile", "--policy", "="]) == list(map(str, Policy))
    assert _bash(scripts, ["compile", "--without", "offload,re"]) == ["offload,recompute"]
    assert _bash(scripts, ["compile", "--without", ""]) == list(TECHNIQUES)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(("words", "expected"), ASKED, ids=[" ".join(words) for words, _ in ASKED])
def test_fish(scripts, words: Sequence[str], expected: Sequence[str]):
    asked = f"source mbc.fish; complete -C '{' '.join(('mbc', *words))}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", asked], cwd=scripts, capture_output=True, text=True, check=True
    )  # fmt: skip
    offered = {line.split("\t")[0] for line in done.stdout.splitlines()}
    assert offered - {"mbc.bash", "mbc.zsh", "mbc.fish"} == set(expected)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_reads_its_script(scripts):
    done = subprocess.run(["zsh", "-f", "-n", "mbc.zsh"], cwd=scripts, capture_output=True, text=True, check=True)
    assert not done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_option_is_there(scripts, shell: str):
    text = (scripts / f"mbc.{shell}").read_text(encoding="utf-8")
    described = parser().described().all()
    assert {command.path for command in described} >= {(), ("compile",), *(("profile", verb) for verb in VERBS)}
    for command in described:
        offered = _words_of(shell, text, command.path)
        for option in command.options:
            assert set(option.names) <= offered, command.path


def _words_of(shell: str, text: str, path: Sequence[str]) -> set[str]:
    """Return all words of a script about one command, with options as they are typed."""
    at = " ".join(path)
    if shell == "fish":
        start = f"complete -c mbc -n '{f'__mbc_at {at}'.strip()}'"
        part = "\n".join(line for line in text.splitlines() if line.startswith(start))
        return set(re.sub(r" -([sl]) (\S+)", lambda m: f" {'-' if m[1] == 's' else '--'}{m[2]}", part).split())
    if shell == "zsh":
        part = text.split(f"\n{'_'.join(('_mbc', *path))}() {{\n")[1].split("\n}\n")[0]
        return set(re.findall(r"'\*(--?[\w-]+)=?\[", part))
    part = text.split(f"\n        {shlex.quote(at)})\n")[1].split(";;")[0]
    return set(re.split(r"[\s()]+", part))


def test_the_command_prints_the_script(mbc):
    done = mbc("completions", "bash")
    assert done.code == 0 and done.out == completions("bash")
