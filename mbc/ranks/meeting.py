"""How ranks meet: rank 0 listens, all others connect to it.

On one machine rank 0 listens at a socket in a folder that only its user can enter. On several machines it listens at
`MBC_MASTER`, or at an address derived from the variables of torchrun or srun (`RankEnvironment.master`). If mpirun
started the ranks, it listens at any port, which is broadcast through mpi4py. Both ends prove that they know a key:
`MBC_KEY`, or else the name of the job. A job's name keeps trainings apart, but it keeps strangers out only if nobody
else knows it (mbc's own names are random).
"""

from __future__ import annotations

import hashlib
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import AuthenticationError

import numpy as np

from mbc.errors import MbcError
from mbc.ranks.endpoints import Place, connected, launching_process, listening, shown, socket_file
from mbc.ranks.environment import Address, RankEnvironment, parse_address
from mbc.ranks.messages import Link, Message
from mbc.ranks.mpi import open_world, wait

MEETING_S = 120.0
SILENCE_S = 10.0  # time until a waiting rank prints for whom it waits
_STRANGER_S = 5.0  # time for a process that connects to identify itself
_RETRY_S = 0.05
_BROADCAST_BYTES = 1024


def meet(environment: RankEnvironment, variables: Mapping[str, str]) -> dict[int, Link]:
    """Return this rank's connections by rank: rank 0 has one to each other rank, every other rank has one to rank 0.

    The ranks wait for each other for `MBC_MEETING_S` seconds (120 by default).

    Raises:
        MbcError: MBC261 if rank 0 cannot listen or the others do not learn where, MBC262 if ranks are missing after
            that time, MBC263 if ranks disagree on the number of ranks, MBC265 if the address would come from an MPI
            that does not work.
    """
    deadline_s = time.monotonic() + meeting_seconds(variables)
    job = environment.job or (f"child of {launching_process()}" if environment.one_machine else "")
    key = hashlib.sha256(f"mbc {variables.get('MBC_KEY') or job}".encode()).digest()
    place: Place | None = environment.master or (socket_file(job) if environment.one_machine else None)
    if place is None and environment.launcher not in ("mpirun", "mpiexec"):
        raise _no_place(environment)
    if environment.rank == 0:
        with listening(place or ("", 0)) as server:
            if place is None:
                place, key = _broadcast(environment, f"{socket.gethostname()}:{server.getsockname()[1]}")
            return _receive_all(environment, server, place, key, deadline_s)
    if place is None:
        place, key = _broadcast(environment, "")
    return {0: _join(environment, place, key, deadline_s)}


def meeting_seconds(variables: Mapping[str, str]) -> float:
    """Return how many seconds ranks wait for each other at the start.

    Raises:
        MbcError: MBC261 if `MBC_MEETING_S` is no number of seconds.
    """
    text = variables.get("MBC_MEETING_S") or str(MEETING_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise MbcError(
            "MBC261", f"MBC_MEETING_S is '{text}', which is not a number of seconds", "set it to 120, for example"
        )
    return seconds


def _receive_all(
    environment: RankEnvironment, server: socket.socket, place: Place, key: bytes, deadline_s: float
) -> dict[int, Link]:
    links: dict[int, Link] = {}
    began_s = time.monotonic()
    silent_until_s = min(began_s + SILENCE_S, deadline_s)
    while len(links) < environment.size - 1:
        try:
            server.settimeout(max(silent_until_s - time.monotonic(), 1e-3))
            link = Link(server.accept()[0])
        except TimeoutError:
            missing = [rank for rank in range(1, environment.size) if rank not in links]
            if silent_until_s < deadline_s:
                _say_waiting(missing, environment, place, deadline_s)
                silent_until_s = deadline_s
                continue
            raise _refused(links, _missing(missing, environment, place, time.monotonic() - began_s)) from None
        except OSError:
            continue  # the process that connected has gone again
        try:
            link.prove_key(key, True, _STRANGER_S)
            with link.patience(_STRANGER_S):
                hello = link.receive()
            rank, size = int(hello.head["rank"]), int(hello.head["size"])
        except (OSError, EOFError, AuthenticationError, ValueError, KeyError, TypeError):
            link.close()  # not a rank of this training
            continue
        if size != environment.size:
            raise _refused(links | {rank: link}, MbcError(
                "MBC263", f"the ranks disagree on their number: rank 0 says {environment.size}, rank {rank} {size}",
                "start all ranks with one command",
            ))  # fmt: skip
        if rank in links or not 0 < rank < size:
            _refused({rank: link}, MbcError(
                "MBC262", f"two processes say that they are rank {rank} of the training at {shown(place)}",
                "give each training its own MBC_JOB, the same for all of its ranks",
            ))  # fmt: skip
            link.close()
            continue
        links[rank] = link
    for link in links.values():
        with suppress(OSError):  # a rank that has died since then: the group notices it
            link.send(Message("welcome"))
    return links


def _join(environment: RankEnvironment, place: Place, key: bytes, deadline_s: float) -> Link:
    began_s = time.monotonic()
    reason = "nothing listens there"
    silent = True
    while (left_s := deadline_s - time.monotonic()) > 0:
        if silent and time.monotonic() - began_s >= SILENCE_S:
            _say_waiting([0], environment, place, deadline_s)
            silent = False
        try:
            link = Link(connected(place, min(left_s, SILENCE_S)))
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(_RETRY_S)
            continue
        try:
            link.prove_key(key, False, left_s)
            link.send(Message("hello", {"rank": environment.rank, "size": environment.size}))
            with link.patience(left_s + _STRANGER_S):  # rank 0 started earlier or later
                answer = link.receive()
        except (OSError, EOFError, AuthenticationError, ValueError) as error:
            link.close()
            reason = "the process that listens there is not rank 0 of this training, or it has ended" + (
                "" if isinstance(error, EOFError) else f" ({error})"
            )
            time.sleep(10 * _RETRY_S)
            continue
        if answer.kind == "welcome":
            return link
        code, message, remedy = (str(answer.head.get(name)) for name in ("code", "message", "remedy"))
        raise MbcError(code, message, remedy)
    error = _missing([0], environment, place, time.monotonic() - began_s)
    error.message += f": {reason}"
    raise error


def _refused(links: Mapping[int, Link], error: MbcError) -> MbcError:
    """Send an error to the ranks that have connected, and return it."""
    for link in links.values():
        with suppress(OSError):
            link.send(Message("refused", {"code": error.code, "message": error.message, "remedy": error.remedy}))
    return error


def _missing(ranks: list[int], environment: RankEnvironment, place: Place, seconds: float) -> MbcError:
    return MbcError(
        "MBC262", f"{_names(ranks, environment)} did not come to the meeting at {shown(place)} within {seconds:.0f} s",
        "see the messages of the missing ranks; wait longer with MBC_MEETING_S, or set another MBC_MASTER=host:port",
    )  # fmt: skip


def _names(ranks: list[int], environment: RankEnvironment) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {environment.size}"


def _say_waiting(missing: list[int], environment: RankEnvironment, place: Place, deadline_s: float) -> None:
    left_s = deadline_s - time.monotonic()
    text = f"waiting for {_names(missing, environment)} at {shown(place)}, for {left_s:.0f} s more ..."
    print(text, file=sys.stderr, flush=True)


def _broadcast(environment: RankEnvironment, address: str) -> tuple[Address, bytes]:
    """Return rank 0's address and a random key, which MPI broadcasts to all ranks."""
    try:
        mpi, world = open_world(environment)
    except MbcError as error:
        raise _no_place(environment, f" ({error.message})") from error
    text = f"{address} {secrets.token_hex(32)}" if address else ""
    buffer = np.frombuffer(text.encode().ljust(_BROADCAST_BYTES), np.uint8).copy()
    wait(world.Ibcast([buffer, mpi.BYTE], root=0), lambda: None)
    location, key = buffer.tobytes().decode().split()
    return parse_address(location, "the address that rank 0 broadcasts"), bytes.fromhex(key)


def _no_place(environment: RankEnvironment, why: str = "") -> MbcError:
    return MbcError(
        "MBC261", f"{environment.launcher} does not say where rank 0 of {environment.size} on several machines is{why}",
        "set MBC_MASTER=host:port for all ranks, a free port of rank 0's machine (not needed with mpirun and mpi4py)",
    )  # fmt: skip
