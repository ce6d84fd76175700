"""The command `mbc`. Exit codes: 0 done, 1 an error that the user can mend (MBCnnn on stderr), 2 wrong usage."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mbc.cli.arguments import parser
from mbc.errors import MbcError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's); returns the exit code."""
    arguments = parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except MbcError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output (head, less) has seen enough. Without this Python complains once more at exit.
        sys.stdout = None  # type: ignore[assignment]
        return 0
