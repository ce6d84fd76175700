"""Progress on stderr: one line that changes on a terminal, plain lines elsewhere; stdout has results only."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TextIO

from mbc.source import visible

_REDRAW_S = 0.1
_PLAIN_S = 10.0  # lines in a log are rare
_PLAIN_UNCHANGED_S = 60.0  # lines that only the time changes are rarer
_PATIENCE_S = 1.0  # work that ends sooner shows no progress
# Functions that receive the lines of `announce`; the last one is the innermost.
_LISTENERS: list[Callable[[str], None]] = []


class StatusLine:
    """A line that replaces itself on a terminal; elsewhere it is printed now and then."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Write to `stream`, by default stderr."""
        self._stream = sys.stderr if stream is None else stream
        self._on_terminal = self._stream.isatty()
        self._last_s = float("-inf") if self._on_terminal else time.monotonic()
        self._drawn = False

    @property
    def on_terminal(self) -> bool:
        """True if the stream is a terminal."""
        return self._on_terminal

    def due(self, changed: bool = True) -> bool:
        """Return whether `update` would show a text now, so that the caller need not compute it otherwise.

        `changed`: something other than the time has changed since the last text.
        """
        plain_s = _PLAIN_S if changed else _PLAIN_UNCHANGED_S
        return time.monotonic() - self._last_s >= (_REDRAW_S if self._on_terminal else plain_s)

    def update(self, text: str) -> None:
        """Show a text if the last one has been visible for long enough."""
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
        """Print a line that stays."""
        self.clear()
        self._write(visible(text) + "\n")

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self._drawn:
            self._write("\r\x1b[2K")
            self._drawn = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class Busy:
    """Lets the body of `busy` name its current stage and print lines that stay."""

    def __init__(self, line: StatusLine) -> None:
        """Use the status line `line`."""
        self.stage = ""
        self.turn = threading.Lock()  # held while writing
        self._line = line

    def __call__(self, now: str) -> None:
        """Set the current stage."""
        self.stage = f" ({now})"

    def line(self, text: str) -> None:
        """Print a line that stays."""
        with self.turn:
            self._line.line(text)


def announce(text: str) -> None:
    """Print a line that stays where the work in progress is shown; do nothing where none is shown."""
    if _LISTENERS:
        _LISTENERS[-1](text)


@contextmanager
def announcements_to(listener: Callable[[str], None]) -> Generator[None]:
    """Send to `listener` what the body announces."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.pop()


@contextmanager
def busy(what: str, stream: TextIO | None = None) -> Generator[Busy]:
    """Show `what` and the elapsed time while the body runs, if it takes more than a second.

    Yields:
        An object with which the body names its current stage.
    """
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
            if line.due(at.stage != said):
                said = at.stage
                with at.turn:
                    line.update(f"{what}{said} ... {time.monotonic() - began_s:.0f} s")

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        with announcements_to(at.line):
            yield at
    finally:
        finished.set()
        thread.join()
        line.clear()
