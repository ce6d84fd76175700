"""The command `mbc`.

Exit codes: 0 success, 1 an error that the user can mend (MBCnnn on stderr), 2 wrong usage, 3 another rank of the
training failed first, 70 a bug in mbc, 130 Ctrl-C (also SIGTERM, where a command prints what it has computed so far),
143 SIGTERM. `mbc fit` ends with 0 after a signal, if its results so far have a batch that fits.

* `arguments`: arguments, help and examples of every command
* `outputs`: checks that keep commands from replacing files that people wrote, and their own outputs
* `subject`: sources, plans and packages that the user names
* `start_ranks`: `mbc train` in several processes
* `terminal`: progress on stderr
* `bug`: the message for an exception that nobody foresaw
* `compile_command`: `mbc compile`
* `fit_command`: `mbc fit`
* `nnunet_command`: `mbc nnunet`
* `place_command`: `mbc place`
* `show_command`: `mbc show`
* `report_command`: `mbc report`
* `trace_command`: `mbc trace`
* `diff_command`: `mbc diff`
* `verify_command`: `mbc verify`
* `check_places`: the device and the packages of `mbc check`
* `check_command`: `mbc check`
* `check_launches`: `mbc check --launches`
* `train_command`: `mbc train`
* `train_arguments`: checks of its arguments before anything is planned
* `train_page`: the page that a training writes at its end
* `train_record`: the record of a step that a training writes
* `train_result`: the result that a training prints at its end
* `train_resume`: the command that resumes an interrupted training
* `train_stop`: Ctrl-C and SIGTERM during a training
* `train_view`: the progress of a training
* `predict_command`: `mbc predict`
* `tune_command`: `mbc tune`
* `tune_target`: the training to a target of `mbc tune`
* `import_command`: `mbc import`
* `export_command`: `mbc export`
* `fmt_command`: `mbc fmt`
* `bench_command`: `mbc bench`
* `profile_command`: `mbc profile`
* `profile_machine`: measurements of links and collectives by `mbc profile --gpu all`
* `gpus_command`: `mbc gpus`
* `doctor_command`: `mbc doctor`
* `completions_command`: `mbc completions`
* `lsp_command`: `mbc lsp`
* `__main__`: `python -m mbc.cli`
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from types import FrameType
from typing import TextIO, cast

from mbc.errors import OTHER_RANK_FAILED, MbcError, RankFailed

BUG = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    Args:
        argv: Words of the command line without the program's name; None for those of this process.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed (`>&-`)
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        # Replace characters that the terminal cannot show, rather than fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        from mbc.cli.terminal import Visible

        with _cleaning_up_when_terminated(), redirect_stdout(cast(TextIO, Visible(sys.stdout))):
            return _run(words)
    except MbcError as error:
        sys.stderr.write(f"{error}\n")  # at once: several ranks may share a terminal
        _print_as_json(error, words)
        return OTHER_RANK_FAILED if isinstance(error, RankFailed) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return _unexpected(error, words)


def _print_as_json(error: MbcError, words: Sequence[str]) -> None:
    """Print an error on stdout, too, where a script asked for JSON and this process is no rank of several."""
    from mbc.ranks.environment import read_environment

    with suppress(MbcError, OSError):
        if "--json" in words and read_environment(os.environ) is None:
            document = {"error": {"code": error.code, "message": error.message, "remedy": error.remedy}}
            print(json.dumps(document, indent=2), flush=True)


def _run(words: Sequence[str]) -> int:
    from mbc.cli.arguments import parse  # imported here, so that Ctrl-C prints one line
    from mbc.cli.arguments.settings_file import with_settings

    arguments = parse(with_settings(words))
    arguments.words = tuple(words)  # for commands that start themselves in other processes
    code = arguments.run(arguments)
    sys.stdout.flush()
    return code


@contextmanager
def _cleaning_up_when_terminated() -> Generator[None]:
    """End the body by an exception at SIGTERM, so that temporary folders are deleted."""
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
    """Print an exception that no part of mbc foresaw, and return the exit code.

    The exception means output that cannot be written, a machine that refuses a file or memory, or a bug.
    """
    unwritten = _unwritten() if isinstance(error, OSError) else None
    if unwritten is None:
        from mbc.cli.bug import of_machine, report

        refused = of_machine(error)
        from mbc.source import visible

        print(visible(report(error, words)) if refused is None else refused, file=sys.stderr)
        return BUG if refused is None else 1
    # Buffered output is flushed at exit, and must not fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(unwritten, BrokenPipeError):
        return 0  # the reader of our output (head, less) has seen enough
    reason = unwritten.strerror or str(unwritten)
    print(MbcError("MBC240", f"cannot write the output: {reason}", "send it elsewhere"), file=sys.stderr)
    return 1


def _unwritten() -> OSError | None:
    """Return the error that makes stdout unwritable, or None: an OSError does not say which file it belongs to."""
    try:
        print(flush=True)
    except OSError as error:
        return error
    return None
