"""Logs of a training: the figures of intervals of steps and of epochs, as lines of JSON and for TensorBoard."""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self, cast

from mbc.errors import MbcError
from mbc.runtime.checkpoint import why
from mbc.runtime.replace import replace_file, try_replacing
from mbc.train.epoch import Epoch, Interval

Fields = dict[str, str | int | float | None]


class Log(Protocol):
    """Where figures go."""

    def write(self, fields: Fields) -> None: ...

    def close(self) -> None: ...


def fields_of(told: Interval | Epoch) -> Fields:
    """What is logged. `step` counts those of the whole training; other figures are of the interval or the epoch."""
    fields: Fields = {
        "kind": "epoch" if isinstance(told, Epoch) else "interval",
        "step": told.total_steps,
        "epoch": told.epoch,
        "loss": _number(told.loss),
        "accuracy": told.accuracy,
    }
    fields |= {name: _number(value) for name, value in told.metrics.items()}
    if isinstance(told, Epoch):
        fields |= {"test_accuracy": told.test_accuracy, "waited_s": told.waited_seconds}
        fields |= {f"test_{name}": _number(value) for name, value in told.test_metrics.items()}
    return fields | {
        "learning_rate": told.learning_rate,
        "images_per_s": told.rows / max(told.seconds, 1e-9),
        "seconds": told.seconds,
        "bad_steps": told.bad_steps,
    }


def _number(value: float) -> float | None:
    """None where it is not finite, which JSON has no number for."""
    return value if math.isfinite(value) else None


class JsonLines:
    """A file with one JSON object a line. Of what is there, lines up to `step` stay: a training that goes on from a
    checkpoint has those after it once more. Raises MBC290."""

    def __init__(self, path: Path, step: int = 0) -> None:
        self._path = path
        kept = [line for line, of_line in _lines(path) if of_line <= step]
        try:
            replace_file(path, (line + b"\n" for line in kept))
            self._file = path.open("ab")
        except (OSError, ValueError) as error:
            raise _unwritten(path, why(error)) from error

    def write(self, fields: Fields) -> None:
        try:
            self._file.write(json.dumps(fields).encode() + b"\n")
            self._file.flush()  # whoever reads it meanwhile sees whole lines
        except OSError as error:
            raise _unwritten(self._path, why(error)) from error

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files in a folder, as the `tensorboard` package writes them. Of what is there, figures up to `step` are
    still shown, as `JsonLines` keeps them. Raises MBC290 and MBC291."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        writer = _tensorboard("summary.writer.event_file_writer")
        self._event = _tensorboard("compat.proto.event_pb2")
        self._summary = _tensorboard("compat.proto.summary_pb2").Summary
        try:
            self._writer = writer.EventFileWriter(str(folder))
        except (OSError, ValueError) as error:
            raise _unwritten(folder, why(error)) from error
        self._add(step + 1, session_log=self._event.SessionLog(status=self._event.SessionLog.START))

    def write(self, fields: Fields) -> None:
        kind, step = str(fields["kind"]), cast(int, fields["step"])
        values = [
            self._summary.Value(tag=f"{kind}/{name}", simple_value=value)
            for name, value in fields.items()
            if name not in ("kind", "step") and value is not None
        ]
        self._add(step, summary=self._summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **what))


class Logs:
    """All logs of a training, closed at the end of a `with`; `write` is a callback of `train`.

    What is there stays as it is until the first `write`: a training may be refused, or end before it.
    """

    def __init__(self, lines: Path | None, tensorboard: Path | None, step: int = 0) -> None:
        """`step`: that from which the training goes on. Raises what `check_logs` does, as `write` may, too."""
        check_logs(lines, tensorboard)
        self._places = [(k, p) for k, p in ((JsonLines, lines), (TensorBoard, tensorboard)) if p is not None]
        self._step = step
        self._closing = ExitStack()
        self._logs: list[Log] = []

    def write(self, told: Interval | Epoch) -> None:
        while self._places:
            kind, place = self._places[0]
            self._logs.append(log := kind(place, self._step))
            self._closing.callback(log.close)
            del self._places[0]
        for log in self._logs:
            log.write(fields_of(told))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()


def check_logs(lines: Path | None, tensorboard: Path | None) -> None:
    """MBC290 and MBC291 where a log could not be written: better known before anything is planned."""
    if lines is not None:
        _lines(lines)
        try:
            if not lines.parent.is_dir():
                raise OSError("its folder does not exist")
            try_replacing(lines)
        except (OSError, ValueError) as error:
            raise _unwritten(lines, why(error)) from error
    if tensorboard is not None:
        _tensorboard("summary.writer.event_file_writer")
        if tensorboard.exists() and not tensorboard.is_dir():
            raise _unwritten(tensorboard, "it is no folder")
        there = next(folder for folder in (tensorboard, *tensorboard.absolute().parents) if folder.exists())
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise _unwritten(tensorboard, f"'{there}' is no folder that can be written")


def _lines(path: Path) -> Sequence[tuple[bytes, int]]:
    """The lines of a log and their steps, but for a last one that was not written to its end. MBC290 where the file is
    no log: it is somebody's, and not to be written over."""
    try:
        *whole, _ = path.read_bytes().split(b"\n") if path.is_file() else [b""]
        return [(line, _step_of(json.loads(line))) for line in whole]
    except OSError as error:
        raise _unwritten(path, why(error)) from error
    except (ValueError, KeyError, TypeError, RecursionError):
        reason = "what is there is no log of a training, and is not written over"
        raise _unwritten(path, reason, "choose another file") from None


def _step_of(fields: Any) -> int:
    if type(fields["step"]) is not int:
        raise ValueError("step")
    return fields["step"]


def _unwritten(path: Path, reason: str, remedy: str = "choose another place that can be written") -> MbcError:
    return MbcError("MBC290", f"cannot write the log '{path}': {reason}", remedy)


def _tensorboard(name: str) -> Any:
    """A module of the package, which is imported only where it is asked for."""
    try:
        return importlib.import_module(f"tensorboard.{name}")
    except ImportError as error:
        raise MbcError(
            "MBC291",
            f"TensorBoard is asked for, and its package cannot be imported: {error}",
            "pip install 'mbc-compiler[tensorboard]', or leave --tensorboard out: --log writes the same figures",
        ) from error
