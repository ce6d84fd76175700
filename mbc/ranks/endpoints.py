"""Places at which rank 0 listens: sockets of this machine, or ports of any machine."""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from mbc.errors import MbcError
from mbc.ranks.environment import Address

_MOST_PATH_BYTES = 107  # limit of a socket's path

Place = Path | Address


def socket_file(job: str) -> Path:
    """Return the path of the socket at which rank 0 of a job listens on one machine.

    Raises:
        MbcError: MBC261 if the socket's folder belongs to another user, or others can enter it.
    """
    name = hashlib.sha256(job.encode()).hexdigest()[:16] + ".sock"
    folder = Path(tempfile.gettempdir()) / f"mbc-{os.getuid()}"
    if len(os.fsencode(folder / name)) > _MOST_PATH_BYTES:
        folder = Path("/tmp") / folder.name
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if about.st_uid != os.getuid() or about.st_mode & 0o177077 != 0o040000:
        raise MbcError(
            "MBC261", f"ranks cannot meet in '{folder}': it must be a folder that you alone can enter",
            "remove it, or set TMPDIR to another folder, the same for all ranks",
        )  # fmt: skip
    return folder / name


def shown(place: Place) -> str:
    """Return a place's text for messages: the path, or host:port."""
    return str(place) if isinstance(place, Path) else f"{place[0]}:{place[1]}"


@contextmanager
def listening(place: Place) -> Generator[socket.socket]:
    """Yield a socket that listens at a place until the body ends.

    Raises:
        MbcError: MBC261 if it cannot listen there.
    """
    try:
        if isinstance(place, Path):
            with socket.socket(socket.AF_UNIX) as probe, suppress(FileNotFoundError, ConnectionRefusedError):
                probe.connect(os.fspath(place))
                raise OSError("another training with this name listens there")
            place.unlink(missing_ok=True)  # a socket of a training that was killed
            server = socket.create_server(os.fspath(place), family=socket.AF_UNIX)
        elif socket.has_dualstack_ipv6():
            server = socket.create_server(("", place[1]), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            server = socket.create_server(("", place[1]))
    except OSError as error:
        raise MbcError(
            "MBC261", f"rank 0 cannot listen at {shown(place)}: {error.strerror or error}",
            "set MBC_MASTER=host:port to a free port of rank 0's machine, the same for all ranks"
            if not isinstance(place, Path) else "give each training its own MBC_JOB, the same for all of its ranks",
        ) from error  # fmt: skip
    try:
        with server:
            server.listen(128)
            yield server
    finally:
        if isinstance(place, Path):
            place.unlink(missing_ok=True)


def connected(place: Place, patience_s: float) -> socket.socket:
    """Return a socket that is connected to a place.

    Raises:
        OSError: Nothing listens there, or a port does not answer within `patience_s` seconds.
    """
    if not isinstance(place, Path):
        return socket.create_connection(place, timeout=patience_s)
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(os.fspath(place))
    except OSError:
        client.close()
        raise
    return client


def launching_process() -> int:
    """Return the number of the nearest ancestor process that is no rank itself; all ranks of this machine share it."""
    process = os.getpid()
    while True:
        try:
            # The second field is the command in brackets, which may contain any character.
            fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
            parent = int(fields.split()[1])
            if b"\0PMI_RANK=" not in b"\0" + Path(f"/proc/{parent}/environ").read_bytes():
                return parent
        except (OSError, ValueError):
            return os.getppid()
        process = parent
