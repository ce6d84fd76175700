"""Reads files that a user names and that may come from others: regular files of limited size."""

from __future__ import annotations

import io
import os
import stat
import sys
from pathlib import Path

from mbc.units import show_size


def read_file(path: Path, most_bytes: int) -> bytes:
    """Return all bytes of a file.

    Raises:
        OSError: The file cannot be read; is not a regular file (a pipe would block, a device may never end); or is
            longer than `most_bytes`, in which case nothing is read.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        check_file(status, most_bytes)
        data = file.read(status.st_size + 1)  # no more, because `read` allocates this much memory first
        if len(data) > status.st_size:  # the file has grown meanwhile, or has no size
            data += file.read(most_bytes + 1 - len(data))
    if len(data) > most_bytes:
        raise OSError(_too_long(len(data), most_bytes))
    return data


def read_text(path: Path, most_bytes: int) -> str:
    """Return the text of a file in UTF-8, with Python's line ends.

    Raises:
        OSError: As for `read_file`.
        UnicodeDecodeError: The file is not UTF-8.
    """
    return io.TextIOWrapper(io.BytesIO(read_file(path, most_bytes)), encoding="utf-8").read()


def check_file(status: os.stat_result, most_bytes: int = sys.maxsize) -> None:
    """Raise OSError unless the status is that of a regular file of at most `most_bytes`."""
    if stat.S_ISDIR(status.st_mode):
        raise OSError("it is a folder")
    if not stat.S_ISREG(status.st_mode):
        raise OSError("it is not a regular file")
    if status.st_size > most_bytes:
        raise OSError(_too_long(status.st_size, most_bytes))


def _too_long(size_bytes: int, most_bytes: int) -> str:
    return f"it has {show_size(size_bytes)}, but at most {show_size(most_bytes)} are read"
