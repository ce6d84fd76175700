"""Where a package is made before it stands: a temporary folder beside its place, which goes whatever happens.

Who uses such a folder holds a lock on it, which the operating system takes away with the process: the next one that
writes a package here removes what a killed one left, and nothing of one that still runs.
"""

from __future__ import annotations

import ctypes
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

NEW, OLD = "new", "old"  # in a temporary folder: the package, and what stood in its place
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_LONGEST_NAME = 64  # of the package's in the temporary folder's, which must not be too long for a file system


@contextmanager
def temporary_folder(folder: Path) -> Generator[Path]:
    """A new folder beside `folder`, gone at the end. Raises OSError."""
    temporary, lock = _make(folder)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def swap(new: Path, folder: Path, old: Path) -> None:
    """Put `new` in the place of `folder`: at once where the file system can exchange the two, so that there is a whole
    package at every moment; else `folder` is kept as `old` until the new one stands."""
    if not folder.exists():
        new.rename(folder)
        return
    if _exchange(new, folder):
        return
    folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        old.rename(folder)
        raise


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names of one file system in one step; False where that is not to be had (renameat2 of Linux)."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def clear(folder: Path) -> None:
    """Remove what killed processes left beside `folder`. What one had taken from its place is put back there."""
    for left in sorted(folder.parent.glob(f"{glob.escape(_prefix(folder))}*")):
        try:
            lock = _lock(left)
        except OSError:
            continue  # in use, somebody else's, or gone
        try:
            if (left / OLD).is_dir() and not folder.exists():
                (left / OLD).rename(folder)
            shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(lock)


def _prefix(folder: Path) -> str:
    return f".{folder.name[:_LONGEST_NAME]}.mbc-"


def _make(folder: Path) -> tuple[Path, int | None]:
    """A new folder and the lock on it; None on a file system without locks, where `clear` removes nothing."""
    while True:
        made = Path(tempfile.mkdtemp(prefix=_prefix(folder), dir=folder.parent))
        try:
            lock = _lock(made)
        except (BlockingIOError, FileNotFoundError):
            continue  # before it was locked, another process took it for a left-over
        except OSError:
            return made, None
        if made.exists():
            return made, lock
        os.close(lock)


def _lock(folder: Path) -> int:
    """Take the lock on a folder. Raises OSError where it is held, the folder is gone, or there are no locks."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
