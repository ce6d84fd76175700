"""The predicted time of each line of a source, planned in a process of its own.

Planning takes seconds; the process is ended when the times of another text are needed. `python -m
mbc.editor.line_times GPU` reads a source and prints JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

KEPT_PLANS = 16
_POLITENESS = 10  # niceness of the process beside the editor


@dataclass(frozen=True, slots=True)
class LineTimes:
    """The predicted times of a source.

    Attributes:
        gpu: GPU of the plan.
        step_us: Time of the training step.
        lines_us: Time of all launches of the step that stem from a line, by line.
        estimated: Lines with times that no profile has.
        error: Reason why there is no plan; empty if there is one.
        code: Code of an error that the user can mend.
        remedy: Remedy of that error.
    """

    gpu: str
    step_us: float = 0.0
    lines_us: dict[int, float] = field(default_factory=dict[int, float])
    estimated: frozenset[int] = frozenset()
    error: str = ""
    code: str = ""
    remedy: str = ""


class Planner:
    """A planner of one text at a time, the latest one."""

    def __init__(self, gpu: str, ready: Callable[[str, LineTimes], None]) -> None:
        """Plan for `gpu`; call `ready` in another thread as soon as the times of a text are available."""
        self.gpu = gpu
        self._ready = ready
        self._known: OrderedDict[str, LineTimes] = OrderedDict()
        self._lock = threading.Lock()
        self._asked = ""
        self._process: subprocess.Popen[str] | None = None

    def times(self, text: str) -> LineTimes | None:
        """Return the times of a text; None if they are not available yet, in which case planning starts."""
        with self._lock:
            if text in self._known:
                return self._known[text]
            if text != self._asked or self._process is None:
                self._end()
                self._asked = text
                self._process = process = _started(self.gpu)
                threading.Thread(target=self._wait, args=(text, process), daemon=True).start()
        return None

    def close(self) -> None:
        """End the process that plans."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _wait(self, text: str, process: subprocess.Popen[str]) -> None:
        try:
            out, _ = process.communicate(text)
        except OSError:  # the process was ended before it had read the text
            out = ""
            process.wait()
        with self._lock:
            if self._process is not process:
                return
            self._process = None
            failed = LineTimes(self.gpu, error="the planner has ended")
            self._known[text] = times = failed if process.returncode else decoded(out)
            if len(self._known) > KEPT_PLANS:
                self._known.popitem(last=False)
        self._ready(text, times)


def _started(gpu: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mbc.editor.line_times", gpu],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8",
    )  # fmt: skip


def planned(text: str, gpu: str) -> LineTimes:
    """Plan a source for a GPU, without measuring anything."""
    from mbc.compiler import compile_plan
    from mbc.errors import MbcError
    from mbc.options import Options
    from mbc.plan.model import Kernel
    from mbc.source import Source

    try:
        plan = compile_plan(Source("source", text), Options(gpu=gpu))
    except MbcError as error:
        return LineTimes(gpu, error=error.message, code=error.code, remedy=error.remedy)
    lines = {op.name: op.span.line for op in plan.graph.train if op.span is not None}
    lines_us: dict[int, float] = {}
    estimated: set[int] = set()
    for launch in plan.train.launches:
        line = next((lines[name] for name in launch.operations if name in lines), None)
        if line is not None:
            lines_us[line] = lines_us.get(line, 0.0) + launch.work.time_us
            if isinstance(launch.work, Kernel) and not launch.work.measured:
                estimated.add(line)
    return LineTimes(plan.target.gpu, plan.predictions.train_us, lines_us, frozenset(estimated))


def encoded(times: LineTimes) -> str:
    """Return times as JSON."""
    return json.dumps({**asdict(times), "estimated": sorted(times.estimated)})


def decoded(text: str) -> LineTimes:
    """Read times from JSON."""
    document = json.loads(text)
    return LineTimes(
        document["gpu"],
        document["step_us"],
        {int(line): us for line, us in document["lines_us"].items()},
        frozenset(document["estimated"]),
        document["error"],
        document["code"],
        document["remedy"],
    )


if __name__ == "__main__":
    os.nice(_POLITENESS)
    sys.stdout.write(encoded(planned(sys.stdin.read(), sys.argv[1])))
