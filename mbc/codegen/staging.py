"""The temporary folder in which a package is written: it is beside the package's place and is always removed.

A process that uses such a folder holds a lock on it. The operating system releases the lock when the process ends: the
next process that writes a package here removes the folders of killed processes, and none that is in use.
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

NEW, OLD = "new", "old"  # in a temporary folder: the new package, and the one that it replaces
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_LONGEST_NAME = 64  # characters of the package's name in that of the temporary folder, which file systems limit


@contextmanager
def temporary_folder(folder: Path) -> Generator[Path]:
    """Yield a new folder beside `folder`, and remove it at the end.

    Raises:
        OSError: The folder cannot be created.
    """
    temporary, lock = _make(folder)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def swap(new: Path, folder: Path, old: Path) -> None:
    """Put `new` in the place of `folder`.

    If the file system can exchange both folders in one step, a whole package exists at every moment. Otherwise `folder`
    is kept as `old` until the new package is in place.
    """
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
    """Exchange two names of one file system in one step; return False if renameat2 of Linux is not available."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def clear(folder: Path) -> None:
    """Remove temporary folders of killed processes beside `folder`. Restore a package that such a process moved."""
    for left in sorted(folder.parent.glob(f"{glob.escape(_prefix(folder))}*")):
        try:
            lock = _lock(left)
        except OSError:
            continue  # in use, another user's, or gone
        try:
            if (left / OLD).is_dir() and not folder.exists():
                (left / OLD).rename(folder)
            shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(lock)


def _prefix(folder: Path) -> str:
    return f".{folder.name[:_LONGEST_NAME]}.mbc-"


def _make(folder: Path) -> tuple[Path, int | None]:
    """Return a new folder and the lock on it; the lock is None on a file system without locks.

    On such a file system `clear` removes nothing.
    """
    while True:
        temporary = Path(tempfile.mkdtemp(prefix=_prefix(folder), dir=folder.parent))
        try:
            lock = _lock(temporary)
        except (BlockingIOError, FileNotFoundError):
            continue  # another process removed the folder as a left-over before it was locked
        except OSError:
            return temporary, None
        if temporary.exists():
            return temporary, lock
        os.close(lock)


def _lock(folder: Path) -> int:
    """Take the lock on a folder; raise OSError if it is held, the folder is gone, or there are no locks."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
