"""Processes that measure, one a GPU: what they are given by stdin and what they say by stdout are pickled messages."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import IO, Any

from mbc.version import PACKAGE

Told = SimpleQueue[tuple[int, Any]]  # the index of a process, and what it says; None when it has ended
Process = subprocess.Popen[bytes]


@contextmanager
def started(worker: Sequence[str], tasks: Sequence[tuple[str, object]], told: Told) -> Generator[list[Process]]:
    """A process for each GPU, with its task. When the body is over their stdin ends, and they are waited for; Ctrl-C
    kills them."""
    processes: list[Process] = []
    threads: list[threading.Thread] = []
    try:
        for index, (gpu, task) in enumerate(tasks):
            # A session of its own: Ctrl-C of the terminal is for us, who then end it in an orderly way.
            process = subprocess.Popen(
                list(worker),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(gpu),
                start_new_session=True,
            )
            processes.append(process)
            send(process, task)
            assert process.stdout is not None
            threads.append(threading.Thread(target=_listen, args=(index, process.stdout, told), daemon=True))
            threads[-1].start()
        yield processes
    except KeyboardInterrupt:
        for process in processes:
            process.kill()
        raise
    finally:
        stop(processes)
        for process in processes:
            process.wait()
        for thread in threads:
            thread.join()


def send(process: Process, message: object) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it died: who listens will know
        pickle.dump(message, process.stdin)
        process.stdin.flush()


def stop(processes: Sequence[Process]) -> None:
    """End their stdin."""
    for process in processes:
        if process.stdin is not None:
            with suppress(OSError):  # it is gone already
                process.stdin.close()


def speaker() -> Callable[[object], None]:
    """In such a process: what sends a message. Ctrl-C is for who started it, who ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not come between the messages

    def say(message: object) -> None:
        pickle.dump(message, messages)
        messages.flush()

    return say


def received() -> Any:
    """In such a process: the next message that was sent to it."""
    return pickle.load(sys.stdin.buffer)


def _environment(gpu: str) -> dict[str, str]:
    """The child's: one GPU, counted as nvidia-smi counts, and the mbc that this process runs."""
    here = str(PACKAGE.parent)
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": gpu,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def _listen(index: int, messages: IO[bytes], told: Told) -> None:
    """Pass on what a child says; None when it has ended."""
    try:
        with suppress(EOFError, pickle.UnpicklingError):
            while True:
                told.put((index, pickle.load(messages)))
    finally:
        told.put((index, None))
