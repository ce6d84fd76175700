"""The command `mbc`. Exit codes: 0 done, 1 an error that the user can mend (MBCnnn on stderr), 2 wrong usage."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from mbc.cli.arguments import parse
from mbc.errors import MbcError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's); returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A table with a character that the terminal lacks is better than no table.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except MbcError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output (head, less) has seen enough. What is still buffered must go somewhere at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
