"""Files that appear whole or not at all: written under a temporary name in their folder, then renamed.

The temporary name is hidden and ends in `.part`. The file is locked while it is written. The lock distinguishes files
that another process is writing from those that a killed process has left behind.
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
    """Write `parts` (bytes, or objects with the buffer protocol) to `path`, with permissions `mode`.

    Raises:
        OSError: The file cannot be written; then nothing has changed.
    """
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
            name.replace(path)  # still locked, so that no process takes the file for a leftover
    except BaseException:  # Ctrl-C, too
        name.unlink(missing_ok=True)
        raise


def try_replacing(path: Path) -> None:
    """Raise an error unless a file can be written to `path`; an existing file stays as it is.

    Raises:
        OSError: The file cannot be written.
    """
    remove_leftovers(path)
    check_replaceable(path)
    file, name = _part(path)
    with file:
        name.unlink()


def check_replaceable(path: Path) -> None:
    """Raise an error if `path` exists and is not a regular file but, for example, a folder or a device.

    Raises:
        OSError: The path exists and is not a regular file.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is a folder" if path.is_dir() else "it is not an ordinary file")


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files of interrupted writes of `path`; files that cannot be removed stay."""
    for name in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with contextlib.suppress(OSError), name.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name.unlink()


def _part(path: Path) -> tuple[IO[bytes], Path]:
    """Return a new temporary file in the folder of `path`, locked, and its name."""
    while True:
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        file = os.fdopen(number, "wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue  # another process took the file for a leftover before it was locked
        except OSError:
            return file, Path(name)  # a file system without locks, on which no process removes leftovers
        if Path(name).exists():
            return file, Path(name)
        file.close()
