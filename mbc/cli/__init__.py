"""The command `mbc`.

Exit codes: 0 done, 1 an error that the user can mend (MBCnnn on stderr), 2 wrong usage, 3 another rank of the training
failed first, 70 a bug in mbc, 130 Ctrl-C (and SIGTERM, where a command ends with what it knows), 143 SIGTERM.

* `arguments`: arguments, help and examples of every command
* `outputs`: what commands write replaces nothing that people wrote, nor one another
* `subject`: what a user names: a source, a plan or a package
* `start_ranks`: `mbc train` in several processes
* `terminal`: progress on stderr
* `bug`: what is said of an unforeseen exception
* `compile_command`: `mbc compile`
* `fit_command`: `mbc fit`
* `show_command`: `mbc show`
* `report_command`: `mbc report`
* `trace_command`: `mbc trace`
* `diff_command`: `mbc diff`
* `verify_command`: `mbc verify`
* `check_places`: the device and the packages of `mbc check`
* `check_command`: `mbc check`
* `check_launches`: `mbc check --launches`
* `train_command`: `mbc train`
* `train_arguments`: what it is asked for, checked before anything is planned
* `train_page`: the page that a training writes at its end
* `train_record`: the record of a step that a training writes
* `train_result`: what a training tells at its end
* `train_resume`: the command with which one that ended early goes on
* `train_stop`: what Ctrl-C and SIGTERM do to one
* `train_view`: what it shows while it runs
* `tune_command`: `mbc tune`
* `tune_target`: its training to a target
* `import_command`: `mbc import`
* `export_command`: `mbc export`
* `fmt_command`: `mbc fmt`
* `bench_command`: `mbc bench`
* `profile_command`: `mbc profile`
* `profile_machine`: what `mbc profile --gpu all` measures around the GPUs
* `gpus_command`: `mbc gpus`
* `doctor_command`: `mbc doctor`
* `completions_command`: `mbc completions`
* `lsp_command`: `mbc lsp`
* `__main__`: `python -m mbc.cli`
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from types import FrameType
from typing import TextIO, cast

from mbc.errors import OTHER_RANK_FAILED, MbcError, RankFailed

BUG = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's); returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed (`>&-`)
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        # A table with a character that the terminal lacks is better than no table.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        from mbc.cli.terminal import Visible

        with _cleaning_up_when_terminated(), redirect_stdout(cast(TextIO, Visible(sys.stdout))):
            return _run(words)
    except MbcError as error:
        sys.stderr.write(f"{error}\n")  # at once: several ranks may share a terminal
        return OTHER_RANK_FAILED if isinstance(error, RankFailed) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return _unexpected(error, words)


def _run(words: Sequence[str]) -> int:
    from mbc.cli.arguments import parse  # here, where Ctrl-C is one line
    from mbc.cli.arguments.settings_file import with_settings

    arguments = parse(with_settings(words))
    arguments.words = tuple(words)  # for commands that start themselves in other processes
    code = arguments.run(arguments)
    sys.stdout.flush()
    return code


@contextmanager
def _cleaning_up_when_terminated() -> Generator[None]:
    """SIGTERM ends the body as an exception does, so that temporary folders go."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _unexpected(error: Exception, words: Sequence[str]) -> int:
    """What no part of mbc has foreseen: output that nobody takes, or a bug."""
    unwritten = _unwritten() if isinstance(error, OSError) else None
    if unwritten is None:
        from mbc.cli.bug import of_machine, report

        refused = of_machine(error)
        from mbc.source import visible

        print(visible(report(error, words)) if refused is None else refused, file=sys.stderr)
        return BUG if refused is None else 1
    # What is still buffered must go somewhere at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(unwritten, BrokenPipeError):
        return 0  # whoever read our output (head, less) has seen enough
    reason = unwritten.strerror or str(unwritten)
    print(MbcError("MBC240", f"cannot write the output: {reason}", "send it elsewhere"), file=sys.stderr)
    return 1


def _unwritten() -> OSError | None:
    """Why nothing can be written to stdout, None where it can: an error does not say to which file it belongs."""
    try:
        print(flush=True)
    except OSError as error:
        return error
    return None
