"""What is shown while something runs: one line that changes on a terminal, plain lines elsewhere. Always on stderr,
so that stdout holds results only."""

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

_REDRAW_S = 0.1
_PLAIN_S = 10.0  # a log wants a sign of life, not a film
_PATIENCE_S = 1.0  # what ends sooner needs no progress
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


class StatusLine:
    """A line that replaces itself on a terminal; elsewhere it is printed now and then."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._on_terminal = self._stream.isatty()
        self._last_s = float("-inf") if self._on_terminal else time.monotonic()
        self._drawn = False

    @property
    def on_terminal(self) -> bool:
        return self._on_terminal

    def due(self) -> bool:
        """Whether enough time has passed for `update` to show something: text need not be made otherwise."""
        return time.monotonic() - self._last_s >= (_REDRAW_S if self._on_terminal else _PLAIN_S)

    def update(self, text: str) -> None:
        if not self.due():
            return
        self._last_s = time.monotonic()
        if self._on_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._write(f"\r\x1b[2K{visible(text)[:width]}")
            self._drawn = True
        else:
            self._write(visible(text) + "\n")

    def line(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        self._write(visible(text) + "\n")

    def clear(self) -> None:
        if self._drawn:
            self._write("\r\x1b[2K")
            self._drawn = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class Busy:
    """By which the body of `busy` says what it is at now, and what shall stay."""

    def __init__(self, line: StatusLine) -> None:
        self.stage = ""
        self.turn = threading.Lock()  # to write
        self._line = line

    def __call__(self, now: str) -> None:
        self.stage = f" ({now})"

    def line(self, text: str) -> None:
        """A line that stays."""
        with self.turn:
            self._line.line(text)


@contextmanager
def busy(what: str, stream: TextIO | None = None) -> Generator[Busy]:
    """Says `what` is going on, and for how long, while the body runs for more than a second.

    Gives that by which the body says what it is at now."""
    line = StatusLine(stream)
    finished = threading.Event()
    began_s = time.monotonic()
    at = Busy(line)

    def show() -> None:
        if finished.wait(_PATIENCE_S):
            return
        said = at.stage
        if not line.on_terminal:
            at.line(f"{what} ...")
        while not finished.wait(_REDRAW_S):
            if line.on_terminal or (at.stage != said and line.due()):
                said = at.stage
                with at.turn:
                    line.update(f"{what}{said} ... {time.monotonic() - began_s:.0f} s")

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield at
    finally:
        finished.set()
        thread.join()
        line.clear()


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
