"""Two programs that are timed alternately, each in a process of its own that may run the code of another checkout.

Alternation cancels slow changes of the GPU's clock rate and temperature. While one process times, the other waits, and
the GPU is idle but for the one. A process imports nothing of this checkout but this file, so that `PYTHONPATH` decides
whose mbc it runs.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANSWER = "answer "  # begins a line of standard output that answers a request; libraries may print others
WARM_MS = 250.0  # of steps before the first timing: clock rates settle
LEAST_STEPS = 3  # that are timed together
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Ratio:
    """Times of two programs that were measured in turns, in the unit of the measurement.

    `ratio` is the median, over the rounds, of the second program's time over the first's, and `spread` the distance
    between the quartiles of these ratios.
    """

    first: float
    second: float
    ratio: float
    spread: float
    rounds: int


def in_turns(first: Callable[[], float], second: Callable[[], float], rounds: int) -> Ratio:
    """Return the times of two programs that are measured once in each of at least two rounds; the order changes."""
    pairs: list[tuple[float, float]] = []
    for number in range(rounds):
        if number % 2:
            other = second()
            pairs.append((first(), other))
        else:
            pairs.append((first(), second()))
    low, median, high = statistics.quantiles([other / one for one, other in pairs], n=4)
    one, other = (statistics.median(times) for times in zip(*pairs, strict=True))
    return Ratio(one, other, median, high - low, rounds)


class Worker:
    """A process that answers requests one at a time; a context manager."""

    def __init__(self, command: Sequence[str], checkout: Path, limit_s: float = 300.0) -> None:
        """Start the process.

        Args:
            command: The command line.
            checkout: The checkout whose mbc the process imports.
            limit_s: Seconds that an answer may take.
        """
        self._limit_s = limit_s
        with ExitStack() as stack:
            self._errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            self._closing = stack.pop_all()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, cwd=checkout,
            env={**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        )  # fmt: skip

    def ask(self, **request: Any) -> Any:
        """Return the answer to a request.

        Raises:
            RuntimeError: The process refuses the request or has ended, or the answer takes too long.
        """
        assert self._process.stdin and self._process.stdout
        late = threading.Timer(self._limit_s, self._process.kill)
        late.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith(ANSWER):
                    answer = json.loads(line.removeprefix(ANSWER))
                    if "failed" in answer:
                        raise RuntimeError(answer["failed"])
                    return answer["value"]
        except BrokenPipeError:
            pass
        finally:
            late.cancel()
        self._errors.seek(0)
        last = "; ".join(self._errors.read().strip().splitlines()[-3:])
        raise RuntimeError(f"the process ended with exit code {self._process.wait()}: {last}")

    def __enter__(self) -> Worker:
        """Return this worker."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._closing.close()


def answer_requests(answer: Callable[..., Any]) -> None:
    """Answer the requests of standard input, one a line, with what `answer` returns for their fields."""
    for line in sys.stdin:
        try:
            reply: Mapping[str, Any] = {"value": answer(**json.loads(line))}
        except Exception as error:
            reply = {"failed": f"{type(error).__name__}: {error}"}
        print(ANSWER + json.dumps(reply), flush=True)


def step_worker(checkout: Path, package: Path, device: str = "cuda") -> Worker:
    """Return a worker that answers `block_ms` with the median time in ms of training steps that fill this time."""
    return Worker([sys.executable, str(Path(__file__).resolve()), str(package), device], checkout)


def answer_with_steps(package: Path, device: str) -> None:
    """Time training steps of a package when asked."""
    import numpy as np

    from mbc.ir.types import DType
    from mbc.runtime.module import Module

    random = np.random.default_rng(0)
    with Module(package, device=device) as module:
        types = [module.plan.graph.values[name].type for name in module.plan.graph.inputs]
        arrays: list[Any] = [
            np.zeros(t.shape, np.int32) if t.dtype is DType.INT32 else random.standard_normal(t.shape, np.float32)
            for t in types
        ]
        if device == "cuda":
            from pycuda import gpuarray  # pyright: ignore[reportMissingImports]

            arrays = [gpuarray.to_gpu(array) for array in arrays]

        def step() -> Any:
            return module.step(*arrays, lr=LEARNING_RATE)

        warm_ms: list[float] = []
        while sum(warm_ms) < WARM_MS:
            warm_ms += _host_ms(step, 1)
        step_ms, times_ms = min(warm_ms), _gpu_ms if device == "cuda" else _host_ms

        def answer(block_ms: float) -> float:
            return statistics.median(times_ms(step, max(LEAST_STEPS, round(block_ms / step_ms))))

        answer_requests(answer)


def _gpu_ms(step: Callable[[], Any], steps: int) -> list[float]:
    """Return the time of each step between two events, while later steps are queued."""
    import pycuda.driver as driver  # pyright: ignore[reportMissingImports]

    step()  # without it the first timed step would begin on an idle GPU
    events = [driver.Event() for _ in range(steps + 1)]  # of the default stream, which is ordered with the module's
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    events[-1].synchronize()
    return [after.time_since(before) for before, after in itertools.pairwise(events)]


def _host_ms(step: Callable[[], Any], steps: int) -> list[float]:
    times: list[float] = []
    for _ in range(steps):
        began = time.perf_counter()
        float(step())
        times.append((time.perf_counter() - began) * 1e3)
    return times


if __name__ == "__main__":
    answer_with_steps(Path(sys.argv[1]), sys.argv[2])
