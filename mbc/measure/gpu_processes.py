"""Processes that measure, one for each GPU; they receive and send pickled messages by stdin and stdout.

A separate process leaves nothing behind: no context, no memory, no loaded libraries that a plan would have to account
for. Its stdin ends with the process that started it, so that a parent that is killed leaves no orphans.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import IO, Any, Self

from mbc.errors import MbcError
from mbc.version import PACKAGE

Process = subprocess.Popen[bytes]
Say = Callable[[object], None]
SILENT_S = 60.0  # longer than a process takes to open its GPU, and than a rank waits for another rank


@dataclass(frozen=True, slots=True)
class Failure:
    """The error of processes that die or hang; `subject` names what they do not measure, in the plural."""

    code: str
    subject: str
    remedy: str = "end other programs that use the GPUs, and run the same command again; mbc doctor checks the GPUs"

    def error(self, why: str) -> MbcError:
        """Return the error with its reason."""
        return MbcError(self.code, f"{self.subject} were not measured: {why}", self.remedy)


class GpuProcesses:
    """One process for each of some GPUs, from `__enter__` to `__exit__`, which kills the processes."""

    def __init__(
        self,
        worker: Sequence[str],
        gpus: Sequence[str],
        failure: Failure,
        hear: Callable[[int, Any], None] = lambda index, message: None,
    ) -> None:
        """Prepare the processes.

        Args:
            worker: Command that starts a process, which calls `serve`.
            gpus: Value of CUDA_VISIBLE_DEVICES of each process.
            failure: Error of a process that dies or hangs.
            hear: Receives the messages that are not answers, with the index of their process.
        """
        self.messages: SimpleQueue[tuple[int, Any]] = SimpleQueue()  # None as message: the process has ended
        self._worker, self._gpus, self._failure, self._hear = worker, gpus, failure, hear
        self._processes: list[Process] = []
        self._threads: list[threading.Thread] = []
        self._is_stopped = False

    def __enter__(self) -> Self:
        """Start the processes."""
        try:
            for index, gpu in enumerate(self._gpus):
                # A separate session: the terminal sends Ctrl-C to the parent only, which ends the children in order.
                self._processes.append(
                    subprocess.Popen(
                        list(self._worker),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        env=_environment(gpu),
                        start_new_session=True,
                    )
                )
                self._threads.append(threading.Thread(target=self._listen, args=(index,), daemon=True))
                self._threads[-1].start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the processes: one that waits for another rank on its GPU does not notice that its stdin ends."""
        for process in self._processes:
            process.kill()
        self.stop()
        for process in self._processes:
            process.wait()
        for thread in self._threads:
            thread.join()

    def ask(self, tasks: Sequence[object], silent_s: float | None = SILENT_S) -> tuple[Any, ...]:
        """Send a task to each of the first processes, and wait for one answer of each.

        Args:
            tasks: Task of each process; some of the last processes may have none.
            silent_s: Longest time without a message of any process, None for no limit.

        Returns:
            The answers in the order of the tasks; None for a process that ended, or failed, after `stop`.

        Raises:
            MbcError: The error of a process, or the `Failure` of processes that die or are silent.
        """
        for process, task in zip(self._processes, tasks, strict=False):
            _send(process, task)
        answers: dict[int, Any] = {}
        while len(answers) < len(tasks):
            try:
                index, message = self.messages.get(timeout=silent_s)
            except Empty:
                raise self._failure.error(f"no process sent a message for {silent_s:.0f} s") from None
            match message:
                case "answer", answer:
                    answers[index] = answer
                case ("error", _) | None if self._is_stopped:
                    answers.setdefault(index)
                case "error", MbcError() as error:
                    raise error
                case None:
                    status = self._processes[index].wait()
                    raise self._failure.error(f"the process of GPU {index} died (exit status {status})")
                case _:
                    self._hear(index, message)
        return tuple(answers[index] for index in range(len(tasks)))

    def stop(self) -> None:
        """End the stdin of each process, which asks it to end early."""
        self._is_stopped = True
        for process in self._processes:
            assert process.stdin is not None
            with suppress(OSError):  # the process has ended
                process.stdin.close()

    def _listen(self, index: int) -> None:
        """Put each message of a process into the queue, and None when the process has ended."""
        stream: IO[bytes] | None = self._processes[index].stdout
        assert stream is not None
        try:
            with suppress(EOFError, pickle.UnpicklingError):
                while True:
                    self.messages.put((index, pickle.load(stream)))
        finally:
            self.messages.put((index, None))


def serve(measure: Callable[[Any, Say], Generator[object, Any]]) -> None:
    """Measure, in a process that `GpuProcesses` started.

    Args:
        measure: Generator that yields the answer to each task. It is called with the first task and a function that
            sends other messages to the parent; each `yield` returns the next task.
    """
    from mbc.measure.gpu import DoesNotFit

    say = _speaker()
    try:
        answers = measure(_received(), say)
        answer = next(answers)
        while True:
            say(("answer", answer))
            answer = answers.send(_received())
    except MbcError as error:
        say(("error", MbcError(error.code, error.message, error.remedy)))
    except DoesNotFit as error:
        message = f"there is too little free GPU memory to measure: {error}"
        say(("error", MbcError("MBC275", message, "end other programs that use the GPUs")))
    except (BrokenPipeError, EOFError, KeyboardInterrupt):
        pass  # the parent has ended, or asks this process to end


def _send(process: Process, message: object) -> None:
    """Send a message to a process; ignore a process that died."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # the process died; the reader of its messages notices that
        pickle.dump(message, process.stdin)
        process.stdin.flush()


def _speaker() -> Say:
    """Return, in a process that measures, a function that sends a message to the parent.

    Ctrl-C is then ignored, because the parent handles it and ends this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the messages

    def say(message: object) -> None:
        pickle.dump(message, messages)
        messages.flush()

    return say


def _received() -> Any:
    """Return, in a process that measures, the next message of the parent."""
    return pickle.load(sys.stdin.buffer)


def _environment(gpu: str) -> dict[str, str]:
    """Return the child's environment: one GPU, numbered as nvidia-smi does, and the mbc that this process runs."""
    here = str(PACKAGE.parent)
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": gpu,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTHONPATH": os.pathsep.join(paths),
    }
