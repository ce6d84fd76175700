"""Processes that measure, one for each GPU; they receive and send pickled messages by stdin and stdout."""

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

MessageQueue = SimpleQueue[tuple[int, Any]]  # index of a process, and its message; None when it has ended
Process = subprocess.Popen[bytes]


@contextmanager
def started(
    worker: Sequence[str], tasks: Sequence[tuple[str, object]], messages: MessageQueue
) -> Generator[list[Process]]:
    """Start a process for each GPU, with its task, and yield the processes.

    After the body their stdin ends, and the caller waits for them. Ctrl-C kills them.

    Args:
        worker: Command that starts a process.
        tasks: Value of CUDA_VISIBLE_DEVICES and task of each process.
        messages: Queue that receives (index of the process, message); the message is None when the process has ended.
    """
    processes: list[Process] = []
    threads: list[threading.Thread] = []
    try:
        for index, (gpu, task) in enumerate(tasks):
            # A separate session: the terminal sends Ctrl-C to the parent only, which then ends the children in order.
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
            threads.append(threading.Thread(target=_listen, args=(index, process.stdout, messages), daemon=True))
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
    """Send a message to a process; ignore a process that died."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # the process died; the reader of its messages notices that
        pickle.dump(message, process.stdin)
        process.stdin.flush()


def stop(processes: Sequence[Process]) -> None:
    """End the stdin of each process."""
    for process in processes:
        if process.stdin is not None:
            with suppress(OSError):  # the process has ended
                process.stdin.close()


def speaker() -> Callable[[object], None]:
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


def received() -> Any:
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


def _listen(index: int, stream: IO[bytes], messages: MessageQueue) -> None:
    """Put each message of a child into the queue, and None when the child has ended."""
    try:
        with suppress(EOFError, pickle.UnpicklingError):
            while True:
                messages.put((index, pickle.load(stream)))
    finally:
        messages.put((index, None))
