"""A headless Chromium, driven through the pipe of its DevTools protocol by JSON messages that end in a zero byte."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0


def find_browser() -> str | None:
    """Return the path of Chromium or Chrome on this machine."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for path in map(shutil.which, names) if path), None)


class Browser:
    """One page. `errors`: exceptions and errors of its console; `requests`: the URLs that it requested."""

    def __init__(self, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read_in, self._out = os.pipe()
        self._in, write_out = os.pipe()
        program = find_browser()
        assert program is not None

        def connect() -> None:  # in the child: it reads from 3 and writes to 4
            held = os.dup(read_in), os.dup(write_out)
            high = [os.dup2(one, at) for one, at in zip(held, (20, 21), strict=True)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
             "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
             f"--user-data-dir={self._home.name}", "about:blank"],
            preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(read_in)
        os.close(write_out)
        self._buffer = b""
        self._next = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._home.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE_S
        while True:
            answer = self._read(end)
            if answer.get("id") == self._next:
                assert "error" not in answer, answer
                return answer["result"]
            self._hear(answer)

    def _read(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._in, 1 << 20)
            assert more, "the browser has ended"
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _hear(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"])[:600])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.errors.append(json.dumps(parameters["args"])[:600])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def open(self, page: Path, ready: str = "document.documentElement?.dataset.ready === 'yes'") -> None:
        """Load a file and wait until `ready` is true."""
        self.call("Page.navigate", url=page.as_uri())
        self.wait(ready)

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + PATIENCE_S
        while not self.run(condition):
            assert time.monotonic() < end, f"never true: {condition}; {self.errors}"
            time.sleep(0.02)

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        """Change the size of the window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def mouse(self, x: float, y: float, kind: str = "mouseMoved") -> None:
        """Send a mouse event at a point of the window."""
        pressed = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)

    def click(self, x: float, y: float) -> None:
        """Move the mouse to a point, press and release."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(x, y, kind)

    def picture(self, whole: bool = False) -> bytes:
        """Return a PNG of the window, or of the whole page."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])
