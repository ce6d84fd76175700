"""The command `mbc lsp`."""

from __future__ import annotations

import argparse
import os
import sys

from mbc.errors import MbcError
from mbc.hardware.target import find_device


def run(arguments: argparse.Namespace) -> int:
    """Serve an editor until it ends the server."""
    try:
        from mbc.editor.server import make_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("pygls", "lsprotocol", "attrs", "cattrs"):
            raise
        raise MbcError(
            "MBC326", f"the language server needs {error.name}, which is not installed",
            "pip install 'mbc-compiler[lsp]'",
        ) from error  # fmt: skip
    if arguments.gpu != "auto":
        find_device(arguments.gpu)  # report a wrong name now, not for each line
    server = make_server(arguments.gpu)
    try:
        server.start_io(sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb"))  # the server closes its output
    finally:
        server.planner.close()
    return 0
