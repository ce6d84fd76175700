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
    """A destination of figures."""

    def write(self, fields: Fields) -> None:
        """Write the fields of one report."""
        ...

    def close(self) -> None:
        """Close the destination."""
        ...


def fields_of(report: Interval | Epoch) -> Fields:
    """Return the logged fields of a report.

    `step` counts the steps of the whole training; other figures belong to the interval or the epoch.
    """
    fields: Fields = {
        "kind": "epoch" if isinstance(report, Epoch) else "interval",
        "step": report.total_steps,
        "epoch": report.epoch,
        "loss": _number(report.loss),
        "accuracy": report.accuracy,
    }
    fields |= {name: _number(value) for name, value in report.metrics.items()}
    if isinstance(report, Epoch):
        fields |= {"test_accuracy": report.test_accuracy, "waited_s": report.waited_seconds}
        fields |= {f"test_{name}": _number(value) for name, value in report.test_metrics.items()}
    return fields | {
        "learning_rate": report.learning_rate,
        "images_per_s": report.rows / max(report.seconds, 1e-9),
        "seconds": report.seconds,
        "bad_steps": report.bad_steps,
    }


def _number(value: float) -> float | None:
    """Return a number, or None if it is not finite, which JSON cannot write."""
    return value if math.isfinite(value) else None


class JsonLines:
    """A file with one JSON object in each line."""

    def __init__(self, path: Path, step: int = 0) -> None:
        """Open the file, and keep its lines up to `step`: a training that resumes there writes later lines again.

        Raises:
            MbcError: MBC290 if the file is no log or cannot be written.
        """
        self._path = path
        kept = [line for line, of_line in _lines(path) if of_line <= step]
        try:
            replace_file(path, (line + b"\n" for line in kept))
            self._file = path.open("ab")
        except (OSError, ValueError) as error:
            raise _unwritten(path, why(error)) from error

    def write(self, fields: Fields) -> None:
        """Write one line."""
        try:
            self._file.write(json.dumps(fields).encode() + b"\n")
            self._file.flush()  # readers see whole lines while the training runs
        except OSError as error:
            raise _unwritten(self._path, why(error)) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Event files in a folder, in the format of the `tensorboard` package."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        """Open a new event file; TensorBoard still shows earlier figures up to `step`.

        Raises:
            MbcError: MBC290 if the folder cannot be written, MBC291 if the package is missing.
        """
        writer = _tensorboard("summary.writer.event_file_writer")
        self._event = _tensorboard("compat.proto.event_pb2")
        self._summary = _tensorboard("compat.proto.summary_pb2").Summary
        try:
            self._writer = writer.EventFileWriter(str(folder))
        except (OSError, ValueError) as error:
            raise _unwritten(folder, why(error)) from error
        self._add(step + 1, session_log=self._event.SessionLog(status=self._event.SessionLog.START))

    def write(self, fields: Fields) -> None:
        """Write one event with all figures."""
        kind, step = str(fields["kind"]), cast(int, fields["step"])
        values = [
            self._summary.Value(tag=f"{kind}/{name}", simple_value=value)
            for name, value in fields.items()
            if name not in ("kind", "step") and value is not None
        ]
        self._add(step, summary=self._summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **what))


class Logs:
    """All logs of a training, closed at the end of a `with`; `write` is a callback of `train`.

    Existing files stay unchanged until the first `write`: a training may be refused, or end before it.
    """

    def __init__(self, lines: Path | None, tensorboard: Path | None, step: int = 0) -> None:
        """Check that the logs can be written.

        Args:
            lines: File for lines of JSON; None for none.
            tensorboard: Folder for TensorBoard; None for none.
            step: Step after which the training continues.

        Raises:
            MbcError: The errors of `check_logs`, which `write` may raise, too.
        """
        check_logs(lines, tensorboard)
        self._places = [(k, p) for k, p in ((JsonLines, lines), (TensorBoard, tensorboard)) if p is not None]
        self._step = step
        self._closing = ExitStack()
        self._logs: list[Log] = []

    def write(self, report: Interval | Epoch) -> None:
        """Write a report to all logs, which the first call opens."""
        while self._places:
            kind, place = self._places[0]
            self._logs.append(log := kind(place, self._step))
            self._closing.callback(log.close)
            del self._places[0]
        for log in self._logs:
            log.write(fields_of(report))

    def __enter__(self) -> Self:
        """Return the logs, which the context closes at its end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all logs."""
        self._closing.close()


def check_logs(lines: Path | None, tensorboard: Path | None) -> None:
    """Raise an error if a log cannot be written; called before anything is planned.

    Raises:
        MbcError: MBC290 if a log cannot be written, MBC291 if TensorBoard's package is missing.
    """
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
            raise _unwritten(tensorboard, "it is not a folder")
        there = next(folder for folder in (tensorboard, *tensorboard.absolute().parents) if folder.exists())
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise _unwritten(tensorboard, f"'{there}' is not a folder that can be written")


def _lines(path: Path) -> Sequence[tuple[bytes, int]]:
    """Return the complete lines of a log and their steps.

    Raises:
        MbcError: MBC290 if the file is no log: it is another file of the user, which must not be overwritten.
    """
    try:
        *whole, _ = path.read_bytes().split(b"\n") if path.is_file() else [b""]
        return [(line, _step_of(json.loads(line))) for line in whole]
    except OSError as error:
        raise _unwritten(path, why(error)) from error
    except (ValueError, KeyError, TypeError, RecursionError):
        reason = "the existing file is not a log of a training, and is not overwritten"
        raise _unwritten(path, reason, "choose another file") from None


def _step_of(fields: Any) -> int:
    if type(fields["step"]) is not int:
        raise ValueError("step")
    return fields["step"]


def _unwritten(path: Path, reason: str, remedy: str = "choose another path that can be written") -> MbcError:
    return MbcError("MBC290", f"cannot write the log '{path}': {reason}", remedy)


def _tensorboard(name: str) -> Any:
    """Return a module of TensorBoard's package, which is imported only if it is asked for."""
    try:
        return importlib.import_module(f"tensorboard.{name}")
    except ImportError as error:
        raise MbcError(
            "MBC291",
            f"TensorBoard is asked for, but its package cannot be imported: {error}",
            "pip install 'mbc-compiler[tensorboard]', or leave --tensorboard out: --log writes the same figures",
        ) from error
