"""What is fuzzed: for each kind of input the seeds, how an input is changed, and the code of mbc that is to take it or
to refuse it with an error of its own.

Imported graphs get a target here once there is an importer: a function that reads bytes, and a row in `TARGETS`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz_mutations as mutations
import numpy as np
from checkpoint_mutants import NETWORK, probe
from record import ROOT

from mbc.errors import MbcError

CORPUS = ROOT / "tests" / "fuzz" / "corpus"
SETTLED = frozenset("\n\t")  # what of control characters a message may have
GPU = "h200"


class Wrong(Exception):
    """What mbc answered is no answer: a message with control characters, a bug that it reported."""


@dataclass(frozen=True)
class Target:
    """`judge`: reads the bytes, in a folder that it may write to; an MbcError is an answer, too, any other exception
    a finding. `seeds`: inputs to begin with, beside those of CORPUS. `share`: of all inputs."""

    name: str
    seeds: Callable[[], list[bytes]]
    change: Callable[[bytes, random.Random], bytes]
    judge: Callable[[bytes, Path], str]
    share: float


def answer(target: Target, data: bytes, folder: Path) -> str:
    """`taken`, or the code of the error; raises whatever else mbc raises, and Wrong."""
    try:
        return target.judge(data, folder)
    except MbcError as error:
        text = str(error)
        check_text(text)
        if not (re.fullmatch(r"MBC\d{3}", error.code) and error.message and error.remedy):
            raise Wrong(f"an error without code, message or remedy: {text!r}") from error
        if _of_memory(error):
            raise Wrong(f"refused for want of memory: {text!r}") from error
        return error.code


def check_text(text: str) -> None:
    """Wrong where what would go to a terminal could change what it shows elsewhere."""
    hidden = sorted({c for c in text if not c.isprintable() and c not in SETTLED})
    if hidden:
        raise Wrong(f"a message with {hidden!r}")


def _of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def corpus(target: Target) -> list[bytes]:
    """The committed inputs of a target: what was found with it, and what reached far."""
    return [path.read_bytes() for path in sorted((CORPUS / target.name).glob("*"))]


# Sources


def _source_texts() -> list[str]:
    cases = sorted((ROOT / "tests" / "cases").rglob("*.mbc"))
    small = [path.read_text(encoding="utf-8") for path in cases]
    return [NETWORK, *(text for text in small if len(text) < 1500)]


def _sources() -> list[bytes]:
    _plan_texts()  # the profile and the solver are loaded once: no part of an input's time
    return [text.encode() for text in _source_texts()]


@functools.cache
def _words() -> list[str]:
    texts = [*_source_texts(), (ROOT / "examples" / "resnet.mbc").read_text(encoding="utf-8")]
    from mbc.ops import LAYERS

    return sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]+", text)} | set(LAYERS))


def judge_source(data: bytes, folder: Path) -> str:
    """Lower the text; of a small network also differentiate, and of a few plan."""
    from mbc.compiler import compile_plan
    from mbc.frontend.lower import lower
    from mbc.frontend.parse import parse
    from mbc.ir.transforms.training_step import differentiate
    from mbc.ir.verify import verify_network, verify_training
    from mbc.options import Options
    from mbc.source import Source

    try:
        source = Source("net.mbc", data.decode("utf-8"))
    except UnicodeDecodeError:
        return "no text"  # files.read_text refuses it
    lowered = lower(parse(source), (), None)
    verify_network(lowered.network)
    if len(lowered.network.operations) > 40:
        return "taken"
    verify_training(differentiate(lowered.network, lowered.optimizer, lowered.precision))
    if hashlib.sha256(data).digest()[0] < 12 and len(lowered.network.operations) <= 12:
        compile_plan(source, Options(gpu=GPU))
        return "planned"
    return "taken"


# Plans


@functools.cache
def _plan_texts() -> tuple[bytes, ...]:
    from mbc.compiler import compile_plan
    from mbc.options import Options
    from mbc.plan.file import dump_plan
    from mbc.source import Source

    found: list[bytes] = []
    for precision in ("fp32", "bf16"):
        options = Options(gpu=GPU, settings=(("train.precision", precision),))
        found.append(dump_plan(compile_plan(Source("probe.mbc", NETWORK), options)).encode())
    return tuple(found)


def judge_plan(data: bytes, folder: Path) -> str:
    """Read a plan with the checksum of its content, verify it, and make code of it."""
    from mbc.codegen.view import view
    from mbc.plan.file import load_plan
    from mbc.plan.schema import CHECKSUM, content_checksum
    from mbc.plan.summary import summarise
    from mbc.plan.verify import verify_plan

    text = data.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(text)
        if isinstance(document, dict) and isinstance(document.get(CHECKSUM), str):
            document[CHECKSUM] = content_checksum(document)
            text = json.dumps(document)
    plan = load_plan(text, "plan.json")
    verify_plan(plan)
    for program in (plan.train, plan.infer):
        summarise(plan, program)
    view(plan)
    return "taken"


# Checkpoints


@functools.cache
def _module() -> Any:
    return probe()


def _checkpoints() -> list[bytes]:
    import tempfile

    from mbc.train.checkpoint import Progress, save_checkpoint
    from mbc.train.epoch import Tally

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w"
        save_checkpoint(_module(), path, Progress(1, 2, 0, 2))
        whole = path.read_bytes()
        save_checkpoint(_module(), path, Progress(0, 0, 0, 2, running=Tally(steps=1)))
        return [whole, path.read_bytes()]


def judge_checkpoint(data: bytes, folder: Path) -> str:
    """Load weights, and how far their training had come."""
    from mbc.train.checkpoint import load_checkpoint

    path = folder / "w.safetensors"
    path.write_bytes(data)
    load_checkpoint(_module(), path)
    return "taken"


# Profiles


def _profiles() -> list[bytes]:
    import gzip
    import tempfile

    from mbc.hardware.collectives import CollectiveKind, CollectiveTime, Link
    from mbc.profile.model import Overhead
    from mbc.profile.writer import ProfileWriter
    from tests.profile.profiles import IDENTITY, measurement, request

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.sqlite"
        with ProfileWriter(path, IDENTITY) as writer:
            for kind in ("convolution", "convolution_backward_filter"):
                writer.record(request(8, kind), [measurement(1, 20.0), measurement(2, 10.0, 4096)])
            writer.record_constant("graph_gap_us", 1.25)
            writer.record_overhead(Overhead("context", "", 1 << 20))
            writer.record_collectives(
                [CollectiveTime(CollectiveKind.ALL_REDUCE, 2, Link.NVLINK, 8, 4096, 9.0, 9.0)], []
            )
        data = path.read_bytes()
        return [data, gzip.compress(data, mtime=0)]


def judge_profile(data: bytes, folder: Path) -> str:
    """Read a profile, packed or not, and look up in it what a plan would."""
    from mbc.profile.read import read_profile
    from tests.profile.profiles import request

    path = folder / ("p.sqlite.gz" if data[:2] == b"\x1f\x8b" else "p.sqlite")
    for left in folder.glob("p.sqlite*"):
        left.unlink()
    path.write_bytes(data)
    profile = read_profile(path)
    for rows in (4, 8):
        profile.candidates(request(rows))
    check_text(str(profile.identity))
    for rows_of in profile.measurements.values():
        for one in rows_of:
            check_text(f"{one.provider} {one.name} {one.refused} {one.notes}")
    return "taken"


# Data


def _archives() -> list[bytes]:
    found: list[bytes] = []
    arrays = {"x": np.zeros((4, 2, 3, 3), np.float32), "t": np.arange(4, dtype=np.int64) % 3}
    for write in (np.savez, np.savez_compressed):
        out = io.BytesIO()
        write(out, **arrays)
        found.append(out.getvalue())
    out = io.BytesIO()
    np.save(out, arrays["x"])
    return [*found, out.getvalue()]


def judge_archive(data: bytes, folder: Path) -> str:
    """Open an `.npz`, or an `.npy` beside a sound one, and read a mini-batch of it."""
    from mbc.train.accuracy import inputs_of
    from mbc.train.data import open_data
    from mbc.train.share import Share

    place = folder / "d.npz"
    if data[:6] == b"\x93NUMPY":
        place = folder / "d"
        place.mkdir(exist_ok=True)
        (place / "x.npy").write_bytes(data)
        np.save(place / "t.npy", np.arange(4) % 3)
    else:
        place.write_bytes(data)
    rows = open_data(str(place), inputs_of(_module().plan.graph))
    next(iter(rows.in_order(Share(2, 0, 2))), None)
    return "taken"


# Command lines

_FILES = ("net.mbc", "plan.json", "w.safetensors", "d.npz", "p.sqlite", "folder", "\x1b[2J.mbc", "none")
_VALUES = (
    "h200", "t4", "cpu", "auto", "all", "0", "1", "2", "8", "-1", "1e9", "8GB", "1 B", "1KiB", "10s", "1h", "fp64",
    "fp32",
    "batch=1", "batch=4", "train.precision=bf16", "train.precision=fp64", "memory.device=1GB", "memory.device=500MB",
    "memory.host=0B", "train.optimizer=adamw()", "recompute", "offload,recompute", "micro_batches", "undivided",
    "power_of_two", "cudnn", "mbc", "probe", "cosine", "1,2", "never", "h200,t4", "h200:40GB,h200", "out", "loss",
)  # fmt: skip
_COMMANDS = ("show", "diff", "verify", "compile", "profile", "gpus", "train", "fit", "check", "bench", "doctor")
_ENDS_SOON = frozenset({"show", "diff", "verify", "gpus", "profile"})  # and touch nothing but the folder they stand in


@functools.cache
def _line_words() -> list[str]:
    """Commands, options, files and values."""
    options: set[str] = set()
    for path in sorted((ROOT / "mbc" / "cli" / "arguments").glob("*.py")):
        options |= set(re.findall(r'"(--?[a-z][a-z-]*)"', path.read_text(encoding="utf-8")))
    return [*sorted(options), *_FILES, *_VALUES, *_COMMANDS, "list", "merge", "ship", "run", "--help", "--", "-"]


def _lines() -> list[bytes]:
    lines = (
        "show net.mbc --gpu h200", "show plan.json --by-kind", "diff plan.json plan.json", "verify plan.json --json",
        "profile list p.sqlite", "profile merge p.sqlite p.sqlite -o q.sqlite", "gpus --json", "compile net.mbc -o out",
        "train net.mbc --data d.npz --epochs 1 --checkpoint w.safetensors --device cpu", "fit net.mbc --gpu h200",
        "show net.mbc --gpu h200 --set batch=4 --without recompute --workspace-limit 1KiB", "bench net.mbc",
        "profile diff p.sqlite p.sqlite --limit 3", "profile ship p.sqlite -o q.sqlite.gz", "check net.mbc --seed 1",
    )  # fmt: skip
    return ["\n".join(line.split()).encode() for line in lines]


def _fill(folder: Path) -> None:
    """What command lines name, as at the start."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "folder").mkdir(parents=True)
    contents = {
        "net.mbc": NETWORK.encode(), "plan.json": _plan_texts()[0], "w.safetensors": _checkpoints()[0],
        "d.npz": _archives()[0], "p.sqlite": _profiles()[0], "\x1b[2J.mbc": NETWORK.encode() + b"\x1b",
    }  # fmt: skip
    for name, content in contents.items():
        (folder / name).write_bytes(content)


@functools.cache
def _filled() -> frozenset[str]:
    return frozenset((*(name for name in _FILES if name != "none"),))


def _runs(words: list[str]) -> bool:
    """Whether a line is run and not only read: one that stays within its folder, starts no process, and is short."""
    known = set(_line_words())
    outside = any("/" in word or ".." in word or "~" in word or (":" in word and word not in known) for word in words)
    commands = [word for word in words if word in _COMMANDS]
    measures = words[:1] == ["profile"] and words[1:2] not in (["list"], ["diff"], ["merge"], ["ship"])
    slow = any(word.startswith("--abl") or (word.isdecimal() and int(word) > 9) for word in words)
    return (
        bool(commands) and commands[0] in _ENDS_SOON and words[0] == commands[0] and not (outside or measures or slow)
    )


@functools.cache
def _keep_parser() -> None:
    """Made once: that takes longer than to read a line."""
    from mbc.cli import arguments

    made = arguments.parser()
    arguments.parser = lambda: made


def judge_line(data: bytes, folder: Path) -> str:
    """Read a command line, and run it where it does little."""
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


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target(
            "sources", _sources,
            lambda data, draw: mutations.change_words(_words())(data, draw), judge_source, 0.15,
        ),
        Target("plans", lambda: list(_plan_texts()), mutations.change_json, judge_plan, 0.05),
        Target("checkpoints", _checkpoints, mutations.change_checkpoint, judge_checkpoint, 0.35),
        Target("profiles", _profiles, mutations.change_database, judge_profile, 0.15),
        Target("archives", _archives, mutations.change_archive, judge_archive, 0.2),
        Target(
            "command_lines", _lines,
            lambda data, draw: mutations.change_lines(_line_words())(data, draw), judge_line, 0.1,
        ),
    )
}  # fmt: skip
