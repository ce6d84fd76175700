"""The terminal that a command runs in: what may be written to it, how wide it is, and what Ctrl-C means."""

from __future__ import annotations

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
_ONE_SIGNAL_S = 1.0  # signals within are one: a terminal and a launcher may both pass on the same Ctrl-C

_Handler = Callable[[int, FrameType | None], object]  # of a signal


class Visible:
    """A stream through which nothing reaches the terminal that it would act on, such as names of files from others."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(visible(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def terminated_as_interrupted() -> Generator[None]:
    """SIGTERM (of a batch system, say) ends the body as Ctrl-C does. Only where signals can be handled: not in a thread
    of somebody's program."""
    with _handling({signal.SIGTERM: signal.default_int_handler}):
        yield


@contextmanager
def stoppable() -> Generator[Callable[[], bool]]:
    """After the first Ctrl-C or SIGTERM what the body gets says True; the second one ends the body as Ctrl-C does."""
    asked_s: float | None = None

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked_s
        if asked_s is not None:
            if time.monotonic() - asked_s >= _ONE_SIGNAL_S:
                raise KeyboardInterrupt
            return
        asked_s = time.monotonic()

    handlers: dict[int, _Handler] = {signal.SIGTERM: ask}
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a shell's background jobs have it
        handlers[signal.SIGINT] = ask
    with _handling(handlers):
        yield lambda: asked_s is not None


@contextmanager
def _handling(handlers: Mapping[int, _Handler]) -> Generator[None]:
    """Signals in the body, where they can be handled: not in a thread of somebody's program."""
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
    """What the body warns of (RuntimeWarning) is said at once, as a note, and once each."""
    said: set[str] = set()

    def say(message: Warning | str, *_: object) -> None:
        text = visible(f"note: {message}")
        if text not in said:
            said.add(text)
            print(f"\r\x1b[2K{text}" if sys.stderr.isatty() else text, file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = say
        yield


def output_width() -> int:
    """Columns for a table on stdout: the terminal's, or plenty for a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _FILE_COLUMNS


def bar(share: float, width: int = 20) -> str:
    """A bar of `width` characters, `share` of it filled."""
    filled = round(max(0.0, min(1.0, share)) * width)
    return "#" * filled + "-" * (width - filled)
