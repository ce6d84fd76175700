"""The command `mbc fmt`."""

from __future__ import annotations

import argparse
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from mbc.cli.subject import read_source
from mbc.errors import MbcError
from mbc.plan.file import MOST_BYTES
from mbc.source import Source

_STDIN = "-"


def run(arguments: argparse.Namespace) -> int:
    """Format sources; an error in one source does not keep the others from being formatted."""
    from mbc.frontend.format import format_source

    sources: Sequence[str] = arguments.sources
    failed = False
    for name in dict.fromkeys(sources):
        try:
            source = _read_stdin() if name == _STDIN else read_source(name, "give sources (.mbc)")
            text = format_source(source)
            if arguments.check:
                failed |= _check(source, text)
            elif arguments.stdout or name == _STDIN:
                print(text, end="")
            elif text != source.text:
                _write(Path(name), text)
                print(name)
        except MbcError as error:
            print(error, file=sys.stderr)
            failed = True
    return int(failed)


def _check(source: Source, text: str) -> bool:
    """Print the name of a source that formatting would change; return whether it would."""
    if text != source.text:
        print(source.name)
    return text != source.text


def _read_stdin() -> Source:
    try:
        text = sys.stdin.buffer.read(MOST_BYTES).decode()
    except UnicodeDecodeError as error:
        reason = f"it is not UTF-8 text (byte {error.start})"
        raise MbcError("MBC183", f"cannot read stdin: {reason}", "give a source (.mbc)") from None
    return Source("stdin", text)


def _write(path: Path, text: str) -> None:
    """Replace a file and keep its permissions and line ends; raise MBC325 if that is not possible."""
    from mbc.runtime.replace import replace_file

    try:
        path = path.resolve()  # a link stays one
        ends = "\r\n" if b"\r\n" in path.read_bytes() else "\n"
        replace_file(path, [text.replace("\n", ends).encode()], stat.S_IMODE(path.stat().st_mode))
    except OSError as error:
        reason = error.strerror or str(error)
        raise MbcError("MBC325", f"cannot write '{path}': {reason}", "mbc fmt --stdout prints the layout") from error
