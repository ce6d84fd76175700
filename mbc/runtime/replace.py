"""Files that appear whole or not at all: written under another name beside their place, and moved there.

The other name is hidden and ends in `.part`. While it is written it is locked, so that what a process left behind that
was killed is told from what another one is writing now.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any


def replace_file(path: Path, parts: Iterable[Any], mode: int = 0o644) -> None:
    """Write `parts` (bytes, or what shows its bytes) to `path`, with permissions `mode`. OSError where that fails; then
    nothing has changed."""
    remove_leftovers(path)
    check_replaceable(path)
    file, name = _part(path)
    try:
        with file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            name.chmod(mode)
            name.replace(path)  # still locked: until it has its name nobody may take it for left behind
    except BaseException:  # Ctrl-C too
        name.unlink(missing_ok=True)
        raise


def try_replacing(path: Path) -> None:
    """OSError unless a file can be written to `path`; what is there stays."""
    remove_leftovers(path)
    check_replaceable(path)
    file, name = _part(path)
    with file:
        name.unlink()


def check_replaceable(path: Path) -> None:
    """OSError where something lies at `path` that is no file: a folder, a device."""
    if path.exists() and not path.is_file():
        raise OSError("it is a folder" if path.is_dir() else "it is no ordinary file")


def remove_leftovers(path: Path) -> None:
    """Remove what interrupted writes of `path` have left behind. Best effort: what cannot be removed stays."""
    for name in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with contextlib.suppress(OSError), name.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name.unlink()


def _part(path: Path) -> tuple[IO[bytes], Path]:
    """A new file beside `path`, locked, and its name."""
    while True:
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        file = os.fdopen(number, "wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue  # somebody took it for left behind before it was locked
        except OSError:
            return file, Path(name)  # a file system without locks, where nobody removes anything
        if Path(name).exists():
            return file, Path(name)
        file.close()
