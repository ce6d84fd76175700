"""Processes that end suddenly: killed at a random moment, without free space, with a read-only home.

Each process is a fork of this process, which has loaded everything, so a trial takes no longer than its work.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

Work = Callable[[], int | None]

# Files whose calls of C are moments to be killed at: they write, rename and remove.
WRITERS = frozenset({
    "build.py", "place.py", "cache.py", "objects.py", "replace.py", "checkpoint.py", "writer.py", "logs.py", "loop.py",
    "pathlib.py", "tempfile.py", "shutil.py",
})  # fmt: skip
EXACT = 256  # so many calls are counted one by one, more in sixteens
MOST_S = 300.0  # of one process, on a busy machine
TRACEBACK = 99  # exit code of work that raised


@dataclass(frozen=True)
class Ended:
    """The end of a process. `code`: the exit code, or minus the signal. `said`: the end of the output."""

    code: int
    seconds: float
    said: str

    @property
    def killed(self) -> bool:
        """True if the process was killed."""
        return self.code == -signal.SIGKILL

    @property
    def clear(self) -> bool:
        """True if the work was done, or refused with an error of mbc's own."""
        return self.code == 0 or (self.code == 1 and "error MBC" in self.said)


def forked(work: Work, log: Path, moment: Callable[[], None] | None = None) -> int:
    """Fork a process that calls `moment` and then `work`; return its number."""
    sys.stdout.flush()
    sys.stderr.flush()
    number = os.fork()
    if number:
        return number
    code = TRACEBACK
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if moment is not None:
            moment()
        code = work() or 0
        sys.setprofile(None)
        sys.stdout.flush()
    except BaseException:  # the exit code reports any exception
        sys.setprofile(None)
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def ended(number: int, log: Path, kill_after_s: float | None = None) -> Ended:
    """Wait for a process to end. Kill it if it takes too long."""
    began_s = time.monotonic()
    until_s = began_s + (MOST_S if kill_after_s is None else kill_after_s)
    while True:
        left_s = until_s - time.monotonic()
        result, status = os.waitpid(number, os.WNOHANG)
        if result:
            break
        if left_s <= 0:
            os.kill(number, signal.SIGKILL)
            _, status = os.waitpid(number, 0)
            break
        time.sleep(min(0.002, left_s))
    seconds = time.monotonic() - began_s
    said = log.read_text(encoding="utf-8", errors="replace")[-1500:] if log.exists() else ""
    return Ended(os.waitstatus_to_exitcode(status), seconds, said)


def run(work: Work, log: Path, moment: Callable[[], None] | None = None) -> Ended:
    """Do `work` in a process of its own, and return how it ended."""
    return ended(forked(work, log, moment), log)


def at_call(number: int, count: Path | None = None) -> Callable[[], None]:
    """Return a function that lets the process be killed before call number `number` of the C functions WRITERS.

    With `count`, the calls are counted into a file and nothing is killed.
    """

    def watch() -> None:
        seen = 0

        def call(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal seen
            if event == "c_call" and frame.f_code.co_filename.rpartition(os.sep)[2] in WRITERS:
                seen += 1
                if count is None and seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                elif count is not None and (seen < EXACT or seen % 16 == 0):
                    os.pwrite(file, b"%12d" % seen, 0)

        file = -1 if count is None else os.open(count, os.O_WRONLY | os.O_CREAT)
        sys.setprofile(call)

    return watch


def calls_of(work: Work, log: Path) -> int:
    """Return about how many times the work calls the C functions WRITERS."""
    count = log.with_suffix(".count")
    run(work, log, at_call(0, count))
    return int(count.read_text(encoding="ascii") or "0") if count.exists() else 0


@dataclass
class Killer:
    """Draws moments to kill a process: half of them are calls of writing C functions, half are times."""

    draw: random.Random
    calls: int
    seconds: float
    number: int = 0

    def kill(self, work: Work, log: Path) -> Ended:
        """Do the work in a process that is killed at a random moment."""
        self.number += 1
        if self.number % 2:
            return run(work, log, at_call(self.draw.randint(1, max(1, self.calls))))
        result = ended(forked(work, log), log, self.draw.uniform(0.0, self.seconds))
        if not result.killed:  # it was faster this time
            self.seconds = 0.8 * self.seconds + 0.2 * result.seconds
        return result


# Separate file systems, in a namespace of mounts that no other process sees

_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000
_PRIVATE, _READ_ONLY, _REMOUNT = 0x44000, 0x1, 0x20  # MS_REC | MS_PRIVATE, MS_RDONLY, MS_REMOUNT


def _libc(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mounted(folder: Path, size_bytes: int) -> None:
    """Mount a small file system on `folder`, for this process and its children.

    Raises:
        OSError: This user may not mount file systems on this machine.
    """
    user, group = os.getuid(), os.getgid()
    _libc("unshare", _NEW_USER | _NEW_MOUNTS)
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1", encoding="ascii")
    _libc("mount", b"none", b"/", None, _PRIVATE, None)
    _libc("mount", b"none", os.fsencode(folder), b"tmpfs", 0, f"size={size_bytes}".encode())


def enlarged(folder: Path, size_bytes: int) -> None:
    """Enlarge the file system mounted on `folder`."""
    _libc("mount", b"none", os.fsencode(folder), None, _REMOUNT, f"size={size_bytes}".encode())


def read_only(folder: Path) -> None:
    """Make the file system mounted on `folder` read-only."""
    _libc("mount", b"none", os.fsencode(folder), None, _REMOUNT | _READ_ONLY, None)


def can_mount(log: Path) -> bool:
    """Return whether a process may mount file systems of its own."""
    return run(lambda: mounted(log.parent, 1 << 16), log).code == 0


def file_limit(size_bytes: int) -> None:
    """Limit the length of files. If nothing can be mounted, this stands for a full disk, which fails alike."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))
