"""Progress: one changing line on a terminal, plain lines elsewhere, no line for quick commands."""

from __future__ import annotations

import io
import re
import signal

import pytest

from mbc import progress
from mbc.cli import terminal
from mbc.cli.terminal import bar
from mbc.progress import StatusLine, announce, busy


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def never_late(monkeypatch):
    """Let no command count as slow, however slow the machine is."""
    monkeypatch.setattr(progress, "_PATIENCE_S", 1e6)
    monkeypatch.setattr(progress, "_PLAIN_S", 1e6)


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(progress, "_REDRAW_S", 0.0)


def test_quick_work_shows_no_progress(never_late):
    stream = io.StringIO()
    with busy("planning", stream):
        pass
    assert stream.getvalue() == ""


def test_a_log_gets_one_line(at_once):
    stream = io.StringIO()
    with busy("planning", stream):
        while not stream.getvalue():
            pass
    assert stream.getvalue() == "planning ...\n"


def test_announcements_are_printed_only_where_work_is_shown(never_late):
    outer, inner = io.StringIO(), io.StringIO()
    announce("before")
    with busy("compiling", outer):
        announce("during")
        with busy("verifying", inner):
            announce("inside")
        announce("again")
    announce("after")
    assert (outer.getvalue(), inner.getvalue()) == ("during\nagain\n", "inside\n")


def test_a_log_hears_of_a_long_stage_again_but_less_often(monkeypatch):
    clock_s = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock_s[0])
    line = StatusLine(io.StringIO())
    due: list[tuple[bool, bool]] = []
    for clock_s[0] in (9.0, 11.0, 59.0, 61.0):
        due += [(line.due(), line.due(changed=False))]
    assert due == [(False, False), (True, False), (True, False), (True, True)]
    line.update("planning")
    assert not line.due() and not line.due(changed=False)


def test_a_terminal_gets_a_line_that_goes_away(at_once):
    stream = Terminal()
    with busy("planning", stream) as say:
        say("place")
        while "place" not in stream.getvalue():
            pass
    assert re.search(r"planning \(place\) \.\.\. \d+ s", stream.getvalue())
    assert stream.getvalue().endswith("\r\x1b[2K")


def test_status_line_of_a_log_is_not_a_film(never_late):
    stream = io.StringIO()
    line = StatusLine(stream)
    for step in range(100):
        line.update(f"step {step}")
    line.line("done")
    assert stream.getvalue() == "done\n"


def test_status_line_on_a_terminal_is_cut_to_its_width(at_once):
    stream = Terminal()
    line = StatusLine(stream)
    line.update("x" * 10_000)
    line.line("done")
    assert len(stream.getvalue()) < 1000 and stream.getvalue().endswith("\r\x1b[2Kdone\n")


def test_bar():
    assert bar(0, 4) == "----" and bar(0.5, 4) == "##--" and bar(2, 4) == "####"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_one_ends(monkeypatch, number):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), terminal.stoppable() as asked:
            assert not asked()
            signal.raise_signal(number)
            monkeypatch.setattr(terminal, "_ONE_SIGNAL_S", 1e6)
            signal.raise_signal(number)  # the same, by another way
            assert asked()
            monkeypatch.setattr(terminal, "_ONE_SIGNAL_S", 0)
            signal.raise_signal(number)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_ignored_in_the_background_stay_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with terminal.stoppable() as asked:
            signal.raise_signal(signal.SIGINT)
            assert not asked()
    finally:
        signal.signal(signal.SIGINT, before)
