"""Work in a process of its own with a limit of time, whose last line of output is its result as JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

POLL_S = 0.05


def result_of(script: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run a script with its arguments, and return its result.

    Raises:
        RuntimeError: The script failed; the message is the last line of its errors.
        subprocess.TimeoutExpired: It took longer than `limit_s` seconds.
    """
    done = subprocess.run([sys.executable, *script], capture_output=True, text=True, timeout=limit_s)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def in_own_process(script: Path, request: Any, limit_s: float) -> dict[str, Any]:
    """Run a script with a request, and return its result or the reason of its failure.

    Args:
        script: Receives the request as JSON, as its only argument.
        request: A dataclass with the fields `contender`, a name, and `turn`, a folder or nothing. A process that waits
            for its turn, as the file `<contender>.ready` in this folder says, may wait as long as all others may take.
        limit_s: Seconds that the process may take.
    """
    command = [sys.executable, str(script), json.dumps(asdict(request))]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
        until_s, waits = time.monotonic() + limit_s, bool(request.turn)
        while process.poll() is None:
            if waits and Path(request.turn, f"{request.contender}.ready").exists():
                until_s, waits = time.monotonic() + 2 * limit_s, False
            if time.monotonic() > until_s:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that the script started
                process.wait()
                return {"failed": f"it took more than {limit_s:.0f} s"}
            time.sleep(POLL_S)
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            last = errors.read().strip().splitlines()[-8:]
            return {"failed": "\n".join(last) or f"exit code {process.returncode}"}
        return json.loads(output.read().strip().splitlines()[-1])
