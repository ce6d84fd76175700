"""Sources compiled for the CPU, one object for each file, kept between runs and shared by all processes of a run.

An object is named by the digest of its preprocessed text and the command, so that no stale object is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = Path(os.environ.get("MBC_TEST_OBJECTS", ROOT / "build" / "objects"))
MOST_KEPT = 400  # objects, the oldest go first: several states of all sources
# Threads of the emulator have stacks of their own. The checks of _FORTIFY_SOURCE, which some systems switch on, end a
# program that jumps between stacks.
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE")


def shared_library(
    compiler: Sequence[str], sources: Sequence[Path], includes: Sequence[Path], working: int, result: Path
) -> None:
    """Build a shared library of kernels for the emulator; `compiler` is the command with further flags.

    Sources without a kept object are compiled in parallel; then all objects are linked.

    Raises:
        AssertionError: The compiler failed; the message has its output.
    """
    command = (*compiler, *FLAGS, f"-DMBC_WORKING={working}", *(f"-I{path}" for path in includes), "-x", "c++")
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(lambda source: kept_object(command, source), sources))
    _run((compiler[0], "-shared", "-o", str(result), *map(str, objects)))
    for old in sorted(KEPT.glob("*.o"), key=lambda path: path.stat().st_mtime)[:-MOST_KEPT]:
        old.unlink(missing_ok=True)


def kept_object(command: Sequence[str], source: Path) -> Path:
    """Return the object of a source, by this compiler and these flags; compile it if it does not exist."""
    KEPT.mkdir(parents=True, exist_ok=True)
    text = _run((*command, "-E", "-P", str(source)))
    flags = [word for word in command if not word.startswith("-I")]  # included files are in the preprocessed text
    key = hashlib.sha256(repr(flags).encode() + text).hexdigest()[:32]
    compiled = KEPT / f"{source.stem}-{key}.o"
    with (KEPT / f"{compiled.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be making it
        if compiled.exists():
            os.utime(compiled)
        else:
            part = compiled.with_suffix(f".{os.getpid()}.part")
            _run((*command, "-c", str(source), "-o", str(part)))
            part.replace(compiled)
    return compiled


def _run(command: Sequence[str]) -> bytes:
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout
