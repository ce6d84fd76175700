"""The work that `torture.py` interrupts: compiling over a package, measuring into a profile, and training.

Measuring runs on the workbench of the tests, which is a table of kernels. The compilers are replaced by a script that
writes a file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mbc.cli import main as mbc
from mbc.errors import MbcError

SOURCE = """network tiny(batch = 4) {
  input x[batch, 1, 6, 6] : float
  input t[batch] : class
  logits = x |> conv(4, 3, pad=1) |> bn |> relu |> dropout(0.1) |> global_avgpool |> linear(3)
  output logits
  loss (logits, t) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
"""
COMPILER = """#!/bin/sh
# Stands in for nvcc and g++: what it makes holds its own name.
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
echo "${out##*/}" > "$out"
"""


@dataclass(frozen=True)
class Subject:
    """Work that is interrupted, all of it in the folder that the functions are given.

    Attributes:
        name: Name of the subject.
        begin: Creates the files that exist before.
        work: Does the work and returns its exit code.
        wrong: Returns which file is lost or half-written, or an empty text.
        glance: Returns the result of `wrong` while other processes write.
        again: Runs the command of `work` once more.
        state: Returns a value that an interruption must not change.
    """

    name: str
    begin: Callable[[Path], None]
    work: Callable[[Path], int]
    wrong: Callable[[Path], str]
    glance: Callable[[Path], str]
    again: Callable[[Path], int]
    state: Callable[[Path], Any]


def digest(folder: Path) -> str:
    """Return a digest of the names and contents of all files in a folder."""
    result = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        result.update(f"{path.relative_to(folder)}\0".encode())
        if path.is_file():
            result.update(path.read_bytes() + b"\0")
    return result.hexdigest()[:16]


def names(folder: Path) -> list[str]:
    """Return the names of all files in a folder."""
    return sorted(path.name for path in folder.iterdir())


def at(folder: Path, words: Sequence[str]) -> int:
    """Run a command line in a folder, with its own caches, profiles and temporary files."""
    os.chdir(folder)
    home = os.environ.get("MBC_TORTURE_HOME", str(folder / "home"))
    os.environ |= {"HOME": home, "XDG_CACHE_HOME": f"{home}/cache", "XDG_DATA_HOME": f"{home}/data"}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what a GPU measures is never twice the same
    return mbc(words)


# Compiling


_TOOLS = tempfile.TemporaryDirectory(prefix="mbc-tools-")


@functools.cache
def fake_tools() -> None:
    """Replace the compilers by a script, in this process and its forks."""
    from mbc.codegen import toolchain

    folder = Path(_TOOLS.name)
    script = folder / "cc"
    script.write_text(COMPILER, encoding="ascii")
    script.chmod(0o755)
    part = toolchain.Part(folder, folder, "lib.so.1")
    result = toolchain.Toolchain(script, script, part, part, part, ("sm_90",), ())
    toolchain.find_toolchain = lambda *_, **__: result


def compiling(batch: int) -> Callable[[Path], int]:
    """Return a function that compiles a network of this batch."""

    def work(folder: Path) -> int:
        fake_tools()
        words = ("compile", "net.mbc", "-o", "package", "--force", "--gpu", "h200", "--set", f"batch={batch}")
        return at(folder, words)

    return work


def begin_compiling(folder: Path) -> None:
    """Compile the package that the work replaces."""
    (folder / "net.mbc").write_text(SOURCE, encoding="ascii")
    compiling(4)(folder)


def package_wrong(folder: Path) -> str:
    """Return an empty text if the package is whole, and either the old one or the new one."""
    package = folder / "package"
    if not package.is_dir():
        return "the package is gone"
    kept = json.loads((folder / "known.json").read_text(encoding="ascii")) if (folder / "known.json").exists() else None
    if kept is not None and digest(package) not in kept:
        return "the package is neither the old nor the new one"
    return ""


def plan_wrong(folder: Path) -> str:
    """Return an empty text if there is a package with a whole plan. Its files may be of the old and the new package."""
    from mbc.plan.file import load_plan

    try:
        load_plan((folder / "package" / "plan.json").read_text(encoding="ascii"), "plan.json")
    except (OSError, MbcError) as error:
        return str(error)
    return ""


def package_state(folder: Path) -> Any:
    """Return a digest of the package, and the names of the files beside it."""
    return digest(folder / "package"), [name for name in names(folder) if name not in ("home", "known.json", "log")]


# Measuring

MEASURED_BEFORE = 1


def _needs() -> list[Any]:
    from tests.measure.test_measure import need

    return [need([8, 4, 2], 3.0, channels=8), need([8, 4], 2.0, channels=16), need([4, 2, 1], 1.0, channels=4)]


def measuring(count: int) -> Callable[[Path], int]:
    """Return a function that measures this number of requests."""

    def work(folder: Path) -> int:
        from tests.measure.test_measure import FAST, LEAN, SLOW, Table, run

        try:
            run(Table([FAST, LEAN, SLOW]), folder / "p.sqlite", *_needs()[:count])
        except MbcError as error:
            print(error)
            return 1
        return 0

    return work


def begin_measuring(folder: Path) -> None:
    """Measure the requests that the profile holds before the work."""
    measuring(MEASURED_BEFORE)(folder)


def profile_wrong(folder: Path) -> str:
    """Return an empty text if the profile has all earlier requests, and each request whole.

    Another process may write.
    """
    from mbc.profile.read_profile import read_profile
    from mbc.profile.signature import signature

    try:
        result = read_profile(folder / "p.sqlite")
    except MbcError as error:
        return str(error)
    before = [signature(request) for need in _needs()[:MEASURED_BEFORE] for request in need.requests]
    if any(key not in result.measurements for key in before):
        return "what was measured before is lost"
    halves = [key for key, rows in result.measurements.items() if len(rows) not in (2, 3)]
    return f"half of what is known of {len(halves)} requests is there" if halves else ""


def profile_state(folder: Path) -> Any:
    """Return the contents of the profile without dates, and the names of its files."""
    with closing(sqlite3.connect(folder / "p.sqlite")) as connection:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        result: dict[str, Any] = {}
        for table in sorted(tables):
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            kept = ", ".join(column for column in columns if column not in ("date", "id", "request"))
            result[table] = sorted(map(repr, connection.execute(f"SELECT {kept} FROM {table}")))
    return result, [name for name in names(folder) if name.startswith("p.")]


# Training

_TRAIN = (
    "train", "net.mbc", "--data", "d.npz", "--epochs", "3", "--lr", "0.1", "--checkpoint", "w.safetensors",
    "--checkpoint-every", "2", "--keep-best", "loss", "--log", "log.jsonl", "--log-every", "1", "--device", "cpu",
    "--gpu", "h200",
)  # fmt: skip


def begin_training(folder: Path) -> None:
    """Train the epochs that the checkpoint holds before the work."""
    (folder / "net.mbc").write_text(SOURCE, encoding="ascii")
    random = np.random.default_rng(0)
    arrays = {"x": random.normal(size=(18, 1, 6, 6)).astype(np.float32), "t": random.integers(0, 3, 18)}
    np.savez(folder / "d.npz", **arrays)


def training(folder: Path) -> int:
    """Train with checkpoints, and return the exit code."""
    return at(folder, _TRAIN)


def training_again(folder: Path) -> int:
    """Resume the training, and return the exit code."""
    there = (folder / "w.safetensors").exists()
    return at(folder, (*_TRAIN, "--resume", "w.safetensors") if there else _TRAIN)


def checkpoint_wrong(folder: Path) -> str:
    """Return an empty text if the checkpoint is whole."""
    from mbc.runtime.checkpoint import Checkpoint
    from mbc.train.training_checkpoint import read_progress

    try:
        for name in ("w.safetensors", "w.best.safetensors"):
            if (folder / name).exists():
                read_progress(folder / name)
                checkpoint = Checkpoint(folder / name)
                checkpoint.read_all(checkpoint.tensors)
    except MbcError as error:
        return str(error)
    log = folder / "log.jsonl"
    for line in log.read_bytes().splitlines() if log.exists() else ():
        try:
            json.loads(line)
        except ValueError:
            return "a line of the log is half-written"
    return ""


_OF_THE_CLOCK = ("images_per_s", "seconds", "waited_s")


def training_state(folder: Path) -> Any:
    """Return the log without times, digests of the checkpoints, and the names of all files."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    logged = [{key: value for key, value in line.items() if key not in _OF_THE_CLOCK} for line in lines]
    weights = [
        hashlib.sha256((folder / f"w{end}").read_bytes()).hexdigest() for end in (".safetensors", ".best.safetensors")
    ]
    return logged, weights, [name for name in names(folder) if name not in ("home", "log")]


SUBJECTS: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        Subject("compile", begin_compiling, compiling(3), package_wrong, plan_wrong, compiling(3), package_state),
        Subject("profile", begin_measuring, measuring(3), profile_wrong, profile_wrong, measuring(3), profile_state),
        Subject("train", begin_training, training, checkpoint_wrong, checkpoint_wrong, training_again, training_state),
    )
}


def copy(source: Path, target: Path) -> Path:
    """Copy `source` to a fresh folder, and return the folder."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
    return target
