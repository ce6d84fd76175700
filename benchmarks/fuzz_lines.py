"""Command lines as inputs, one argument a line."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shutil
from pathlib import Path

from checkpoint_mutants import NETWORK
from fuzz_files import archives, checkpoints, plan_texts, profiles
from fuzz_rule import Wrong, check_text
from record import ROOT

_FILES = ("net.mbc", "plan.json", "w.safetensors", "d.npz", "p.sqlite", "folder", "\x1b[2J.mbc", "none")
_VALUES = (
    "h200", "t4", "cpu", "auto", "all", "0", "1", "2", "8", "-1", "1e9", "8GB", "1 B", "1KiB", "10s", "1h", "fp64",
    "fp32",
    "batch=1", "batch=4", "train.precision=bf16", "train.precision=fp64", "memory.device=1GB", "memory.device=500MB",
    "memory.host=0B", "train.optimizer=adamw()", "recompute", "offload,recompute", "micro_batches", "undivided",
    "power_of_two", "cudnn", "mbc", "probe", "cosine", "1,2", "never", "h200,t4", "h200:40GB,h200", "out", "loss",
)  # fmt: skip
_COMMANDS = ("show", "diff", "verify", "compile", "profile", "gpus", "train", "fit", "check", "bench", "doctor")
_ENDS_SOON = frozenset({"show", "diff", "verify", "gpus", "profile"})  # and change only the current folder


@functools.cache
def line_words() -> list[str]:
    """Return the commands, options, files and values of which command lines are made."""
    options: set[str] = set()
    for path in sorted((ROOT / "mbc" / "cli" / "arguments").glob("*.py")):
        options |= set(re.findall(r'"(--?[a-z][a-z-]*)"', path.read_text(encoding="utf-8")))
    return [*sorted(options), *_FILES, *_VALUES, *_COMMANDS, "list", "merge", "ship", "run", "--help", "--", "-"]


def lines() -> list[bytes]:
    """Return the seed command lines, one argument a line."""
    lines = (
        "show net.mbc --gpu h200", "show plan.json --by-kind", "diff plan.json plan.json", "verify plan.json --json",
        "profile list p.sqlite", "profile merge p.sqlite p.sqlite -o q.sqlite", "gpus --json", "compile net.mbc -o out",
        "train net.mbc --data d.npz --epochs 1 --checkpoint w.safetensors --device cpu", "fit net.mbc --gpu h200",
        "show net.mbc --gpu h200 --set batch=4 --without recompute --workspace-limit 1KiB", "bench net.mbc",
        "profile diff p.sqlite p.sqlite --limit 3", "profile ship p.sqlite -o q.sqlite.gz", "check net.mbc --seed 1",
    )  # fmt: skip
    return ["\n".join(line.split()).encode() for line in lines]


def _fill(folder: Path) -> None:
    """Write the files that command lines name, in their initial state."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "folder").mkdir(parents=True)
    contents = {
        "net.mbc": NETWORK.encode(), "plan.json": plan_texts()[0], "w.safetensors": checkpoints()[0],
        "d.npz": archives()[0], "p.sqlite": profiles()[0], "\x1b[2J.mbc": NETWORK.encode() + b"\x1b",
    }  # fmt: skip
    for name, content in contents.items():
        (folder / name).write_bytes(content)


@functools.cache
def _filled() -> frozenset[str]:
    return frozenset((*(name for name in _FILES if name != "none"),))


def _runs(words: list[str]) -> bool:
    """Return whether a line is run and not only parsed: if it stays in its folder, starts no process, and is short."""
    own = set(line_words())
    outside = any("/" in word or ".." in word or "~" in word or (":" in word and word not in own) for word in words)
    commands = [word for word in words if word in _COMMANDS]
    measures = words[:1] == ["profile"] and words[1:2] not in (["list"], ["diff"], ["merge"], ["ship"])
    slow = any(word.startswith("--abl") or (word.isdecimal() and int(word) > 9) for word in words)
    return (
        bool(commands) and commands[0] in _ENDS_SOON and words[0] == commands[0] and not (outside or measures or slow)
    )


@functools.cache
def _keep_parser() -> None:
    """Replace the parser of the command line by one instance: making a parser takes longer than parsing a line."""
    from mbc.cli import arguments

    created = arguments.parser()
    arguments.parser = lambda: created


def judge_line(data: bytes, folder: Path) -> str:
    """Parse a command line, and run it if `_runs` allows it."""
    from mbc.cli import BUG, arguments, main

    _keep_parser()
    words = data.replace(b"\0", b" ").decode("utf-8", "surrogateescape").split("\n")  # no system passes zero bytes
    out, err = io.StringIO(), io.StringIO()
    before = Path.cwd()
    place = folder / "here"
    if not place.is_dir() or {path.name for path in place.iterdir()} != _filled():
        _fill(place)
    code = 0
    try:
        os.chdir(place)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                if _runs(words):
                    code = main(words)
                else:
                    arguments.parse(words)
            except SystemExit as ended:
                code = ended.code
    finally:
        os.chdir(before)
    if code == BUG:
        raise Wrong(err.getvalue())
    check_text(out.getvalue() + err.getvalue())
    if code not in (0, 1, 2):
        raise Wrong(f"exit code {code}: {err.getvalue()}")
    return "taken" if code == 0 else f"exit {code}"
