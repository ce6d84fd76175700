"""A connection between two ranks, and the messages on it: a line of JSON, then plain bytes. Nothing is unpickled."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

_MOST_BYTES = 1 << 28
# A machine that is lost closes no socket: the kernel asks after 2 s of silence, three times, 2 s apart.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
_UNSENT_MS = 8_000  # the same for bytes that were sent and are not acknowledged


@dataclass(frozen=True, slots=True)
class Message:
    """`kind` says what `head` has (plain JSON values); `body` is passed on as it is."""

    kind: str
    head: Mapping[str, Any] = field(default_factory=dict[str, Any])
    body: bytes = b""


class Link:
    """One connection. Threads may send at the same time; one receives. OSError and EOFError where it is broken."""

    def __init__(self, socket_: socket.socket) -> None:
        if socket_.family != socket.AF_UNIX:
            socket_.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNSENT_MS)
            for option, value in _KEEPALIVE:
                socket_.setsockopt(socket.IPPROTO_TCP, option, value)
        socket_.setblocking(True)
        self.connection: Connection = Connection(socket_.detach())
        self._turn = threading.Lock()

    def send(self, message: Message) -> None:
        head = json.dumps({"kind": message.kind, **message.head}).encode()
        with self._turn:
            self.connection.send_bytes(head + b"\n" + message.body)

    def receive(self) -> Message:
        """The next message; ValueError where it is none of ours."""
        head, _, body = self.connection.recv_bytes(_MOST_BYTES).partition(b"\n")
        told = json.loads(head)
        if not (isinstance(told, dict) and isinstance(told.get("kind"), str)):  # pyright: ignore[reportUnknownMemberType]
            raise ValueError("no message of a rank")
        return Message(told.pop("kind"), told, body)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]

    def prove_key(self, key: bytes, listens: bool, patience_s: float) -> None:
        """Both ends show that they know the key, without sending it. OSError, EOFError or
        multiprocessing.AuthenticationError where the other does not, or not in time."""
        with self.patience(patience_s):
            first, second = (deliver_challenge, answer_challenge) if listens else (answer_challenge, deliver_challenge)
            first(self.connection, key)
            second(self.connection, key)

    @contextmanager
    def patience(self, seconds: float) -> Generator[None]:
        """Within the body a receive that waits longer is a BlockingIOError."""
        self._limit(seconds)
        yield
        self._limit(0)

    def _limit(self, seconds: float) -> None:
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))  # 0 is no limit
        with socket.socket(fileno=self.connection.fileno()) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            same.detach()

    def close(self) -> None:
        self.connection.close()
