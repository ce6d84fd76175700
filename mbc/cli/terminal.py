"""The terminal of a command: safe output, its width, progress bars, and signals."""

from __future__ import annotations

import math
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

from mbc.source import visible

_FILE_COLUMNS = 160
_ONE_SIGNAL_S = 1.0  # signals within this time count as one: a terminal and a launcher may both pass on a Ctrl-C

_SAID: list[set[str]] = []  # texts of the notes so far, while a body of `notes` runs

_Handler = Callable[[int, FrameType | None], object]  # handler of a signal


class Visible:
    """A stream that escapes control characters, so that names of foreign files cannot control the terminal."""

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text with control characters escaped; return the length of the text."""
        self._stream.write(visible(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the stream."""
        return getattr(self._stream, name)


@contextmanager
def terminated_as_interrupted() -> Generator[None]:
    """Let SIGTERM (of a batch system, for example) end the body as Ctrl-C does.

    Does nothing outside of the main thread, where signals cannot be handled.
    """
    with _handling({signal.SIGTERM: signal.default_int_handler}):
        yield


class TimeOver(KeyboardInterrupt):
    """The end of the time that the user gave to the body of `interrupted_after`."""


@contextmanager
def interrupted_after(seconds: float) -> Generator[None]:
    """Raise TimeOver in the body after a time in seconds; infinite: never."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeOver

    with _handling({signal.SIGALRM: end}):
        signal.setitimer(signal.ITIMER_REAL, 0.0 if math.isinf(seconds) else seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


@contextmanager
def stoppable() -> Generator[Callable[[], bool]]:
    """Yield a function that returns True after Ctrl-C or SIGTERM; a second signal raises KeyboardInterrupt."""
    asked_s: float | None = None

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked_s
        if asked_s is not None:
            if time.monotonic() - asked_s >= _ONE_SIGNAL_S:
                raise KeyboardInterrupt
            return
        asked_s = time.monotonic()

    handlers: dict[int, _Handler] = {signal.SIGTERM: ask}
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell ignores it in background jobs
        handlers[signal.SIGINT] = ask
    with _handling(handlers):
        yield lambda: asked_s is not None


@contextmanager
def _handling(handlers: Mapping[int, _Handler]) -> Generator[None]:
    """Handle signals during the body. Outside of the main thread, where Python cannot do that, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextmanager
def notes() -> Generator[None]:
    """Print each RuntimeWarning of the body at once as a note, but equal warnings only once, also in inner bodies."""
    said = _SAID[-1] if _SAID else set[str]()

    def say(message: Warning | str, *_: object) -> None:
        text = visible(f"note: {message}")
        if text not in said:
            said.add(text)
            print(f"\r\x1b[2K{text}" if sys.stderr.isatty() else text, file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = say
        _SAID.append(said)
        try:
            yield
        finally:
            _SAID.pop()


def output_width() -> int:
    """Return the columns for a table on stdout: those of the terminal, or 160 for a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _FILE_COLUMNS


def bar(share: float, width: int = 20) -> str:
    """Return a bar of `width` characters, of which `share` are filled."""
    filled = round(max(0.0, min(1.0, share)) * width)
    return "#" * filled + "-" * (width - filled)
