"""A client of `mbc lsp`, which it runs as an editor does."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from typing import Any, cast

PATIENCE_S = 120.0


class Client:
    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mbc.cli", "lsp", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._received: queue.Queue[Any] = queue.Queue()
        self._kept: list[Any] = []
        self._asked = 0
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, method: str, parameters: object) -> Any:
        """Return the result of a request."""
        self._asked += 1
        number = self._asked
        self._send({"id": number, "method": method, "params": parameters})
        answer = self._next(lambda message: message.get("id") == number and "method" not in message)
        assert "error" not in answer, answer
        return answer["result"]

    def tell(self, method: str, parameters: object) -> None:
        self._send({"method": method, "params": parameters})

    def notification(self, method: str) -> Any:
        """Return the parameters of the server's next notification of a method."""
        return self._next(lambda message: message.get("method") == method)["params"]

    def end(self) -> tuple[int, str]:
        """End the server, and return its exit code and its output on stderr."""
        self.ask("shutdown", None)
        self.tell("exit", None)
        assert self.process.stderr is not None
        error = self.process.stderr.read().decode()
        return self.process.wait(PATIENCE_S), error

    def _send(self, message: dict[str, object]) -> None:
        text = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.process.stdin is not None
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(text) + text)
        self.process.stdin.flush()

    def _next(self, wanted: Any) -> Any:
        for i, message in enumerate(self._kept):
            if wanted(message):
                return self._kept.pop(i)
        while True:
            message = self._received.get(timeout=PATIENCE_S)
            if wanted(message):
                return message
            self._kept.append(message)

    def _read(self) -> None:
        out = cast(Any, self.process.stdout)
        while header := out.readline():
            length = int(header.split(b":")[1]) if header.lower().startswith(b"content-length") else 0
            while out.readline() != b"\r\n":
                pass
            self._received.put(json.loads(out.read(length)))
