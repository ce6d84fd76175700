"""A connection between two ranks, and its messages: a line of JSON, then plain bytes. Nothing is unpickled."""

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
# A machine that is lost closes no socket: the kernel probes after 2 s of silence, three times, 2 s apart.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
_UNSENT_MS = 8_000  # longest wait for the acknowledgement of sent bytes


@dataclass(frozen=True, slots=True)
class Message:
    """A message between ranks.

    Attributes:
        kind: Kind of the message, which decides the fields of `head`.
        head: Fields with plain JSON values.
        body: Bytes that are passed on unchanged.
    """

    kind: str
    head: Mapping[str, Any] = field(default_factory=dict[str, Any])
    body: bytes = b""


class Link:
    """One connection. Several threads may send at a time, but only one may receive.

    Methods raise OSError or EOFError if the connection is broken.
    """

    def __init__(self, socket_: socket.socket) -> None:
        """Take over a connected socket and set its keepalive."""
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
        """Send a message."""
        head = json.dumps({"kind": message.kind, **message.head}).encode()
        with self._turn:
            self.connection.send_bytes(head + b"\n" + message.body)

    def receive(self) -> Message:
        """Return the next message.

        Raises:
            ValueError: The bytes are no message of a rank.
        """
        head, _, body = self.connection.recv_bytes(_MOST_BYTES).partition(b"\n")
        fields = json.loads(head)
        if not (isinstance(fields, dict) and isinstance(fields.get("kind"), str)):  # pyright: ignore[reportUnknownMemberType]
            raise ValueError("not a message of a rank")
        return Message(fields.pop("kind"), fields, body)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]

    def prove_key(self, key: bytes, listens: bool, patience_s: float) -> None:
        """Let both ends prove that they know the key, without sending it.

        Args:
            key: The key.
            listens: True on the end that listens, which asks first.
            patience_s: Longest wait for the other end, in seconds.

        Raises:
            OSError: The other end does not answer in time, or the connection is broken.
            EOFError: The other end has closed the connection.
            multiprocessing.AuthenticationError: The other end does not know the key.
        """
        with self.patience(patience_s):
            first, second = (deliver_challenge, answer_challenge) if listens else (answer_challenge, deliver_challenge)
            first(self.connection, key)
            second(self.connection, key)

    @contextmanager
    def patience(self, seconds: float) -> Generator[None]:
        """Limit each receive within the body to `seconds`; a longer wait raises BlockingIOError."""
        self._limit(seconds)
        yield
        self._limit(0)

    def _limit(self, seconds: float) -> None:
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))  # 0 is no limit
        with socket.socket(fileno=self.connection.fileno()) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            same.detach()

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()
