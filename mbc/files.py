"""Files that a user names, and that may come from others: regular ones, of a limited size."""

from __future__ import annotations

import io
import os
import stat
import sys
from pathlib import Path

from mbc.units import show_size


def read_file(path: Path, most_bytes: int) -> bytes:
    """All bytes of a file. OSError with the reason where it cannot be read, is no regular file (a pipe would be waited
    for, a device may never end), or is longer than `most_bytes`: then nothing of it is read."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        check_file(status, most_bytes)
        data = file.read(status.st_size + 1)  # no more: that much memory is taken before anything is read
        if len(data) > status.st_size:  # it has grown meanwhile, or does not know its size
            data += file.read(most_bytes + 1 - len(data))
    if len(data) > most_bytes:
        raise OSError(_too_long(len(data), most_bytes))
    return data


def read_text(path: Path, most_bytes: int) -> str:
    """The text of a file in UTF-8, with line ends as Python has them; UnicodeDecodeError where it is none."""
    return io.TextIOWrapper(io.BytesIO(read_file(path, most_bytes)), encoding="utf-8").read()


def check_file(status: os.stat_result, most_bytes: int = sys.maxsize) -> None:
    """OSError where a file of this status is no regular one or is longer."""
    if stat.S_ISDIR(status.st_mode):
        raise OSError("it is a folder")
    if not stat.S_ISREG(status.st_mode):
        raise OSError("it is no regular file")
    if status.st_size > most_bytes:
        raise OSError(_too_long(status.st_size, most_bytes))


def _too_long(size_bytes: int, most_bytes: int) -> str:
    return f"it has {show_size(size_bytes)}, and {show_size(most_bytes)} is the most that is read"
