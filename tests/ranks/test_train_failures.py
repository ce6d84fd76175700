"""Failures that end a training of two ranks, and events that do not.

Each training is a real `mbc train` on the CPU, whose ranks mpiexec starts.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from mbc.train.training_checkpoint import read_progress
from tests.ranks.processes import LONG_S, runs
from tests.ranks.test_mpi import MPIEXEC, with_mpi
from tests.ranks.test_train import SOURCE, environment, run_in

pytestmark = with_mpi
PROMISE_S = 10.0
# At which a rank is killed: in `make test`, and in all. A campaign: MBC_MOMENTS=50 make test-all.
MOMENTS, ALL_MOMENTS = 5, int(os.environ.get("MBC_MOMENTS", "12"))
MBC = (sys.executable, "-m", "mbc.cli")
# Five mini-batches an epoch. Each rank says which process it is when it begins.
ROWS = """
import os, time
from pathlib import Path
import numpy as np
from mbc.runtime.module import Module

def plain(epoch, rank, ranks):
    assert ranks == 2
    if epoch == 0:
        Path(f"{rank}.new").write_text(str(os.getpid()))
        Path(f"{rank}.new").rename(f"{rank}.pid")
    draws = np.random.default_rng([rank, epoch])
    for _ in range(5):
        yield draws.normal(size=(4, 1, 6, 6)).astype(np.float32), np.arange(4) % 3

def bad(epoch, rank, ranks):
    for images, labels in plain(epoch, rank, ranks):
        yield images, labels + 7 * (epoch == 2 and rank == 1)

def raises(epoch, rank, ranks):
    for number, batch in enumerate(plain(epoch, rank, ranks)):
        assert (epoch, rank, number) != (2, 1, 3), "its disk is gone"
        yield batch

def slow(epoch, rank, ranks):
    for number, batch in enumerate(plain(epoch, rank, ranks)):
        time.sleep(3 if (epoch, rank, number) == (1, 1, 2) else 0)
        yield batch

def drags(epoch, rank, ranks):  # steps of rank 0 take longer than anybody's patience, and so does what it saves
    if (epoch, rank) == (1, 0):
        step, save = Module.step, Module.save
        def slow_step(net, *inputs, lr):
            Path("drags").touch()
            time.sleep(4)
            return step(net, *inputs, lr=lr)
        def slow_save(net, path, **named):
            time.sleep(6)
            save(net, path, **named)
        Module.step, Module.save = slow_step, slow_save
    yield from plain(epoch, rank, ranks)

def full(epoch, rank, ranks):
    if (epoch, rank) == (2, 1):
        def step(*inputs, lr):
            raise MemoryError("Unable to allocate 9.00 TiB")
        Module.step = step
    yield from plain(epoch, rank, ranks)
"""


def compiled_for_two(folder: Path, source: str) -> str:
    """Build the package `pair` for two ranks in a folder, and return what `mbc compile` says."""
    (folder / "tiny.mbc").write_text(source)
    done = run_in(folder, *MBC, "compile", "tiny.mbc", "--gpus", "2", "-o", "pair")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a package for two ranks, which is planned once."""
    folder = tmp_path_factory.mktemp("pair")
    compiled_for_two(folder, SOURCE)
    return folder / "pair"


class Training:
    """A training that knows the processes of its ranks."""

    def __init__(self, pair: Path, folder: Path) -> None:
        self.folder, self.checkpoint = folder, folder / "w.safetensors"
        shutil.copytree(pair, folder / "pair")
        (folder / "rows.py").write_text(ROWS)
        self.process: subprocess.Popen[str] | None = None

    def start(self, data: str, epochs: int, words: Sequence[str] = MBC, more: Sequence[str] = ("--gpus", "2")) -> None:
        self.process = subprocess.Popen(
            [*words, "train", "pair", "--data", f"rows:{data}", "--epochs", str(epochs), "--device", "cpu",
             "--checkpoint", str(self.checkpoint), *more],
            cwd=self.folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ranks(self) -> list[int]:
        """Wait until all ranks have begun the first epoch, and return their processes in order."""
        files = [self.folder / f"{rank}.pid" for rank in range(2)]
        for file in files:
            self._wait_for(file)
        return [int(file.read_text()) for file in files]

    def trains(self) -> None:
        """Wait until a checkpoint has been written."""
        self._wait_for(self.checkpoint)

    def waits_for(self, name: str) -> None:
        """Wait until a rank has created a file of this name."""
        self._wait_for(self.folder / name)

    def ended(self, within_s: float) -> str:
        """Return the output of a training that has failed, and assert that no process is left."""
        assert self.process is not None
        said = "".join(self.process.communicate(timeout=within_s))
        deadline_s = time.monotonic() + 1.0  # for what mpiexec has killed to be gone
        while any(runs(process) for process in self.ranks()):
            assert time.monotonic() < deadline_s, "a rank is left"
            time.sleep(0.02)
        assert self.process.returncode != 0, said
        return said

    def whole_epochs(self) -> int:
        """Return the number of epochs in the checkpoint, which must be valid."""
        assert load_file(self.checkpoint)
        return read_progress(self.checkpoint).epochs

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    def _wait_for(self, file: Path) -> None:
        deadline_s = time.monotonic() + LONG_S
        while not file.exists():
            assert self.process is not None and time.monotonic() < deadline_s
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.01)


@pytest.fixture
def training(pair: Path, tmp_path: Path) -> Iterator[Training]:
    started = Training(pair, tmp_path)
    yield started
    started.end()


@pytest.mark.parametrize(
    "moment", [pytest.param(n, marks=pytest.mark.exhaustive if n >= MOMENTS else ()) for n in range(ALL_MOMENTS)]
)
def test_a_rank_killed_at_any_moment_ends_all(training: Training, moment: int) -> None:
    draws = random.Random(moment)
    if moment % 2:
        training.start("plain", 1_000_000)
    else:
        training.start("plain", 1_000_000, [str(MPIEXEC), "-n", "2", *MBC], ())
    ranks = training.ranks()
    if moment % 5:  # else in the first epoch, mostly
        training.trains()
        time.sleep(draws.random())
    os.kill(ranks[draws.randrange(2)], signal.SIGKILL)
    said = training.ended(PROMISE_S)
    # The other rank reports it, or mpiexec does, which may end that rank first.
    assert re.search("MBC264: rank . of 2 failed: it ended without a message|KILLED BY SIGNAL: 9|signal 9", said), said
    if moment % 5 or training.checkpoint.exists():
        assert training.whole_epochs() >= 1


def test_a_training_goes_on_after_a_rank_was_killed(training: Training) -> None:
    training.start("plain", 1_000_000)
    training.trains()
    os.kill(training.ranks()[1], signal.SIGKILL)
    said = training.ended(PROMISE_S)
    assert re.search(f"^go on with: mbc train .* --resume {training.checkpoint}$", said, re.MULTILINE), said
    epochs = training.whole_epochs()
    training.start("plain", epochs + 2, more=("--gpus", "2", "--resume", str(training.checkpoint)))
    assert training.process is not None
    _, err = training.process.communicate(timeout=LONG_S)
    assert training.process.returncode == 0 and f"epoch {epochs + 1}/{epochs + 2}  loss" in err, err
    assert training.whole_epochs() == epochs + 2


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("bad", "error MBC232: "),
        ("raises", "error MBC171: rows:raises raises AssertionError: its disk is gone (rows.py, line "),
        ("full", "Unable to allocate 9.00 TiB"),
    ],
)
def test_an_error_of_one_rank_ends_all(training: Training, data: str, words: str) -> None:
    training.start(data, 1_000_000)
    training.trains()
    said = training.ended(PROMISE_S)
    assert words in said
    assert training.whole_epochs() == 2  # the third is that in which rank 1 fails


@pytest.mark.parametrize(
    ("rank", "number"), [(None, signal.SIGINT), (0, signal.SIGINT), (1, signal.SIGINT), (None, signal.SIGTERM)]
)
def test_an_interrupt_ends_all(training: Training, rank: int | None, number: signal.Signals) -> None:
    """The signal goes to the parent process of the ranks, or to one of them."""
    training.start("plain", 1_000_000)
    training.trains()
    assert training.process is not None
    os.kill(training.process.pid if rank is None else training.ranks()[rank], number)
    said = training.ended(PROMISE_S)
    assert re.search(f"^go on with: mbc train .* --resume {training.checkpoint}$", said, re.MULTILINE)
    assert rank is not None or (training.process.returncode == 130 and "MBC264" not in said)
    assert training.whole_epochs() >= 1


@pytest.mark.parametrize("rank", [None, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_an_interrupt_waits_for_a_long_step_and_its_checkpoint(training: Training, rank: int | None) -> None:
    training.start("drags", 1_000_000)
    training.waits_for("drags")
    assert training.process is not None
    os.kill(training.process.pid if rank is None else training.ranks()[rank], signal.SIGINT)
    said = training.ended(LONG_S)
    assert re.search(f"^go on with: mbc train .* --resume {training.checkpoint}$", said, re.MULTILINE), said
    running = read_progress(training.checkpoint).running
    assert running is not None and training.whole_epochs() == 1


def test_a_slow_rank_is_waited_for(training: Training) -> None:
    training.start("slow", 2)
    assert training.process is not None
    out, err = training.process.communicate(timeout=LONG_S)
    assert training.process.returncode == 0, err
    assert "after 2 epochs (cpu)" in out and training.whole_epochs() == 2
