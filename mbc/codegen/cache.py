"""Compiled objects, kept from one build to the next: there are few kernels, and nvcc takes seconds for each.

The name of an entry is a digest of everything that its object depends on (mbc/codegen/objects.py), so that an entry
never becomes stale. An entry begins with the digest of its content, so that a half-written file is not an entry. Many
processes may use one folder at the same time, and one of them compiles an object that several need. No error here stops
a build: an object that cannot be read is compiled, and an object that cannot be stored is not stored.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "MBC_CACHE"
LIMIT_BYTES = 1_000_000_000
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class ObjectCache:
    """A folder of objects of at most `limit_bytes`, which evicts the least recently used; None as folder: no cache."""

    folder: Path | None
    limit_bytes: int = LIMIT_BYTES

    def has(self, key: str) -> bool:
        """Return whether there is an object called `key`."""
        return self.folder is not None and (self.folder / key).is_file()

    def fetch(self, key: str, target: Path) -> bool:
        """Write the object called `key` to `target`; return False if there is none."""
        if self.folder is None:
            return False
        entry = self.folder / key
        try:
            data = entry.read_bytes()
            if hashlib.sha256(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
                entry.unlink()
                return False
            target.write_bytes(data[_DIGEST_BYTES:])
        except OSError:
            return False
        with suppress(OSError):
            os.utime(entry)  # marks the entry as used now; a read-only folder keeps its order
        return True

    @contextmanager
    def making(self, key: str) -> Generator[None]:
        """Wait while another process makes the object called `key`, and then let others wait."""
        with ExitStack() as lock:
            with suppress(OSError):  # without a lock, several may make it
                if self.folder is not None:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    path = self.folder / f".{key}.lock"
                    file = lock.enter_context(path.open("wb"))
                    lock.callback(path.unlink, missing_ok=True)
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def keep(self, key: str, source: Path) -> None:
        """Store the object at `source` as `key`."""
        if self.folder is None:
            return
        temporary: Path | None = None
        try:
            data = source.read_bytes()
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=".", dir=self.folder)
            temporary = Path(name)
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(data).digest())
                file.write(data)
            temporary.replace(self.folder / key)
            self._evict()
        except OSError:
            if temporary is not None:
                with suppress(OSError):
                    temporary.unlink()

    def _evict(self) -> None:
        """Delete the least recently used files, including unfinished files of killed processes."""
        assert self.folder is not None
        entries: list[tuple[float, int, Path]] = []
        for path in self.folder.iterdir():
            with suppress(OSError):  # another process may have deleted it
                status = path.stat()
                entries.append((status.st_mtime, status.st_size, path))
        total_bytes = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total_bytes <= self.limit_bytes:
                return
            with suppress(OSError):
                path.unlink()
            total_bytes -= size


def find_cache(environment: Mapping[str, str] | None = None) -> ObjectCache:
    """Return the cache in the folder that MBC_CACHE names (empty: no cache), else in the user's cache folder."""
    env = os.environ if environment is None else environment
    named = env.get(VARIABLE)
    if named is not None:
        return ObjectCache(Path(named).absolute() / "objects" if named else None)
    base = Path(env.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # the XDG specification says to ignore relative paths
        return ObjectCache(base / "mbc" / "objects")
    home = env.get("HOME", "")
    return ObjectCache(Path(home) / ".cache" / "mbc" / "objects" if home else None)
