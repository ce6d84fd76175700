"""Checkpoints of a training: the module's weights file, with the training's progress in its metadata.

Readers of weights ignore metadata, so that a checkpoint is also a weights file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from mbc.errors import MbcError
from mbc.runtime.checkpoint import Checkpoint, why
from mbc.runtime.replace import try_replacing
from mbc.train.epoch import Tally
from mbc.train.schedule import Plateau

_KEY = "mbc.training"
Part = TypeVar("Part")


class Saves(Protocol):
    """An object that writes and reads a weights file."""

    def save(self, path: str | Path, *, metadata: Mapping[str, str] | None = None, ema: bool = False) -> None:
        """Write the states, or the moving averages alone (`ema`), to a file."""
        ...

    def load(self, path: str | Path) -> None:
        """Read the states from a file."""
        ...


@dataclass(frozen=True, slots=True)
class Best:
    """The best epoch by a metric.

    Attributes:
        metric: Name of a `mbc.train.epoch_figures.Criterion`.
        value: The epoch's value of it.
        epoch: Number of the epoch, from 1; 0 in checkpoints of earlier versions.
    """

    metric: str
    value: float
    epoch: int = 0

    def is_better_than(self, other: Best | None, rises: bool) -> bool:
        """Return whether this epoch is better than another one, or cannot be compared with it."""
        if other is None or other.metric != self.metric or math.isnan(other.value):
            return True
        return self.value > other.value if rises else self.value < other.value


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a training has come.

    Attributes:
        epochs: Number of finished epochs.
        steps: Steps in finished epochs.
        seed: Seed that shuffles rows and drives dropout.
        batch: Rows of a step.
        plateau: State of the schedule `plateau`.
        running: Sums over the steps of an epoch that has begun.
        interval: Sums over its steps since the last interval that was reported.
        best: The epoch whose weights are kept as the best ones.
        nearest: The epoch nearest to a target (`mbc.train.target_metric`).
    """

    epochs: int
    steps: int
    seed: int
    batch: int
    plateau: Plateau = field(default_factory=Plateau)
    running: Tally | None = None
    interval: Tally | None = None
    best: Best | None = None
    nearest: Best | None = None

    @property
    def steps_in_all(self) -> int:
        """Number of steps, those of an epoch that has begun included."""
        return self.steps + (0 if self.running is None else self.running.steps)

    @property
    def last(self) -> Best | None:
        """The last finished epoch if it is the one nearest to a target; None if nothing is known about it."""
        return self.nearest if self.nearest is not None and self.nearest.epoch == self.epochs else None


def save_checkpoint(net: Saves, path: Path, progress: Progress) -> None:
    """Write weights and progress to `path`, whole or not at all; MBC162 if that fails."""
    net.save(path, metadata={_KEY: json.dumps(asdict(progress))})


def best_beside(checkpoint: Path) -> Path:
    """Return the path of the best checkpoint: `w.best.safetensors` beside `w.safetensors`."""
    return checkpoint.with_name(f"{checkpoint.stem}.best{checkpoint.suffix}")


def check_not_best(path: Path, progress: Progress) -> None:
    """Raise an error if a training's last weights would overwrite the best weights of the same training.

    Args:
        path: The checkpoint to write; refused if it is a name that `best_beside` gives.
        progress: The progress in the file at `path`.

    Raises:
        MbcError: MBC180 with a name for the last weights.
    """
    stem = path.stem if path.suffix == ".best" else path.stem.removesuffix(".best") + path.suffix
    if not stem or progress.best is None or best_beside(path.with_name(stem)) != path:
        return
    raise MbcError(
        "MBC180",
        f"cannot write the checkpoint '{path}': it holds the best weights of a training, which the last weights"
        " would replace",
        f"give a file for the last weights, too, such as --checkpoint {path.with_name(stem)}",
    )


def check_writable(path: Path) -> None:
    """Raise an error if a checkpoint cannot be written; called before the first epoch, so that no work is lost.

    Raises:
        MbcError: MBC180 with the reason.
    """
    try:
        if not path.parent.is_dir():
            raise OSError("its folder does not exist")
        try_replacing(path)
    except (OSError, ValueError) as error:  # ValueError: a path that the system does not accept
        raise MbcError(
            "MBC180",
            f"cannot write the checkpoint '{path}': {why(error)}",
            "choose a folder that exists and can be written",
        ) from error


def load_checkpoint(net: Saves, path: Path) -> Progress:
    """Load weights into `net`, and return how far the training had come.

    Raises:
        MbcError: The errors of `read_progress` and of the module's `load`.
    """
    progress = read_progress(path)
    net.load(path)
    return progress


def read_progress(path: Path) -> Progress:
    """Return how far the training of a checkpoint had come, without reading its weights.

    Raises:
        MbcError: MBC163 if the file is no complete weights file, MBC181 if it has no progress of a training, or one
            that makes no sense.
    """
    metadata = Checkpoint(path).metadata
    if _KEY not in metadata:
        raise MbcError(
            "MBC181",
            f"'{path}' holds weights, but no progress of a training",
            "resume from a file that `mbc train --checkpoint` wrote, or start a new training from these weights with"
            " --weights",
        )
    try:
        document: Any = json.loads(metadata[_KEY])
        numbers = {name: document[name] for name in _COUNTS}
        parts = {name: _part(kind, document[name]) for name, kind in _PARTS.items() if document.get(name) is not None}
    except (AttributeError, KeyError, ValueError, TypeError, RecursionError):
        raise _implausible(path, repr(metadata[_KEY])[:80]) from None
    for name, number in numbers.items():
        least = 1 if name == "batch" else 0
        if type(number) is not int or not least <= number < 1 << 63:
            raise _implausible(path, f"'{name}' is {number!r:.40}, which is not a number from {least} to 2^63 - 1")
    return Progress(**numbers, **parts)


def _part(kind: type[Part], document: Any) -> Part:
    """Return a part of `Progress` from its JSON fields; ValueError and similar errors if they make no sense."""
    of_kind: dict[str, Any] = {}
    for one in fields(cast(Any, kind)):
        if (kind, one.name) in _ADDED and one.name not in document:
            continue
        value = tuple(document[one.name]) if isinstance(document[one.name], list) else document[one.name]
        if ("None" if value is None else type(value).__name__) not in str(one.type):  # annotations are text here
            raise ValueError(one.name)
        if isinstance(value, int) and value < 0:
            raise ValueError(one.name)
        if isinstance(value, dict) and not all(type(v) is float for v in cast("dict[str, Any]", value).values()):
            raise ValueError(one.name)
        of_kind[one.name] = value
    return kind(**of_kind)


_COUNTS = ("epochs", "steps", "seed", "batch")
_PARTS: dict[str, type[Any]] = {
    "plateau": Plateau,
    "running": Tally,
    "interval": Tally,
    "best": Best,
    "nearest": Best,
}  # parts that files of earlier versions do not have
_ADDED = {(Plateau, "metric"), (Tally, "metric_sums"), (Best, "epoch")}  # fields that they do not have


def _implausible(path: Path, what: str) -> MbcError:
    return MbcError(
        "MBC181", f"the progress of a training in '{path}' makes no sense: {what}", "give a file that `mbc train` wrote"
    )
