"""Checkpoints of a training: the module's weights file with, in its metadata, how far the training had come.

Readers of weights pass over metadata, so a checkpoint is also a weights file.
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
    """What can write and read a weights file."""

    def save(self, path: str | Path, *, metadata: Mapping[str, str] | None = None, ema: bool = False) -> None: ...

    def load(self, path: str | Path) -> None: ...


@dataclass(frozen=True, slots=True)
class Best:
    """The best epoch, by a `epoch_figures.Criterion` of the name `metric`. `epoch`: its number, 0 in checkpoints of
    earlier versions."""

    metric: str
    value: float
    epoch: int = 0

    def is_better_than(self, other: Best | None, rises: bool) -> bool:
        """Also where they cannot be compared."""
        if other is None or other.metric != self.metric or math.isnan(other.value):
            return True
        return self.value > other.value if rises else self.value < other.value


@dataclass(frozen=True, slots=True)
class Progress:
    """`epochs` are finished ones; `steps` those taken in them; `seed` shuffles and drives dropout. `running`: of an
    epoch that has begun; `interval`: of its steps since the last ones that were told. `best`: the epoch whose weights
    are kept; `nearest`: that nearest to a target (`mbc.train.target_metric`)."""

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
        """Those of an epoch that has begun included."""
        return self.steps + (0 if self.running is None else self.running.steps)

    @property
    def last(self) -> Best | None:
        """The last finished epoch where it is the one nearest to a target; None where nothing is known of it."""
        return self.nearest if self.nearest is not None and self.nearest.epoch == self.epochs else None


def save_checkpoint(net: Saves, path: Path, progress: Progress) -> None:
    """Write weights and progress to `path`, whole or not at all. MBC162 where it cannot be written."""
    net.save(path, metadata={_KEY: json.dumps(asdict(progress))})


def best_beside(checkpoint: Path) -> Path:
    """Where the best one lies: `w.best.safetensors` beside `w.safetensors`."""
    return checkpoint.with_name(f"{checkpoint.stem}.best{checkpoint.suffix}")


def check_not_best(path: Path, progress: Progress) -> None:
    """MBC180 where the last weights of a training would be written over the best ones of the same: `path` is what
    `best_beside` names, and its `progress` that of a best checkpoint."""
    stem = path.stem if path.suffix == ".best" else path.stem.removesuffix(".best") + path.suffix
    if not stem or progress.best is None or best_beside(path.with_name(stem)) != path:
        return
    raise MbcError(
        "MBC180",
        f"cannot write the checkpoint '{path}': it holds the best weights of a training, which the last ones would"
        " replace",
        f"give a file for the last ones, too, such as --checkpoint {path.with_name(stem)}",
    )


def check_writable(path: Path) -> None:
    """MBC180 where a checkpoint could not be written: better known before the first epoch than after it."""
    try:
        if not path.parent.is_dir():
            raise OSError("its folder does not exist")
        try_replacing(path)
    except (OSError, ValueError) as error:  # ValueError: a path that no system knows
        raise MbcError(
            "MBC180",
            f"cannot write the checkpoint '{path}': {why(error)}",
            "choose a folder that exists and can be written",
        ) from error


def load_checkpoint(net: Saves, path: Path) -> Progress:
    """Load weights into `net`; returns how far the training had come. Raises what `read_progress` and `load` do."""
    progress = read_progress(path)
    net.load(path)
    return progress


def read_progress(path: Path) -> Progress:
    """How far the training of a checkpoint had come, its weights left alone.

    Raises MBC163 for a file that is no whole weights file, MBC181 for one that says nothing of a training.
    """
    metadata = Checkpoint(path).metadata
    if _KEY not in metadata:
        raise MbcError(
            "MBC181",
            f"'{path}' holds weights but not how far a training had come",
            "resume from a file that `mbc train --checkpoint` wrote, or begin a new training from these weights, with"
            " --weights",
        )
    try:
        told: Any = json.loads(metadata[_KEY])
        numbers = {name: told[name] for name in _COUNTS}
        parts = {name: _part(kind, told[name]) for name, kind in _PARTS.items() if told.get(name) is not None}
    except (AttributeError, KeyError, ValueError, TypeError, RecursionError):
        raise _nonsense(path, repr(metadata[_KEY])[:80]) from None
    for name, number in numbers.items():
        least = 1 if name == "batch" else 0
        if type(number) is not int or not least <= number < 1 << 63:
            raise _nonsense(path, f"'{name}' is {number!r:.40}, which is no number from {least} to 2^63 - 1")
    return Progress(**numbers, **parts)


def _part(kind: type[Part], told: Any) -> Part:
    """A part of `Progress` from what was written of it. ValueError and the like where it is none."""
    of_kind: dict[str, Any] = {}
    for one in fields(cast(Any, kind)):
        if (kind, one.name) in _ADDED and one.name not in told:
            continue
        value = tuple(told[one.name]) if isinstance(told[one.name], list) else told[one.name]
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
}  # not in files of earlier versions
_ADDED = {(Plateau, "metric"), (Tally, "metric_sums"), (Best, "epoch")}  # likewise


def _nonsense(path: Path, what: str) -> MbcError:
    return MbcError(
        "MBC181", f"what '{path}' says of a training makes no sense: {what}", "give a file that `mbc train` wrote"
    )
