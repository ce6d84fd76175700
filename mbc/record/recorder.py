"""CUPTI through `templates/recorder/recorder.cpp`, which is compiled against the headers of the installed CUPTI.

The layout of CUPTI's activity records depends on its version.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mbc.codegen.objects import Recipe, make_library
from mbc.codegen.toolchain import CUDART, CUPTI, GXX, Toolchain, find_toolchain
from mbc.errors import MbcError
from mbc.hardware.target import current_gpu
from mbc.resources import folder
from mbc.runtime.library import PROGRAMS, load_library

SOURCE = "recorder.cpp"
# CUptiResult of cupti_result.h
_NOT_ALLOWED = {35: "INSUFFICIENT_PRIVILEGES", 40: "VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES"}
_SUBSCRIBED = 39  # MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED


@dataclass(frozen=True, slots=True)
class Event:
    """A kernel, copy or fill that a node of a graph ran once, in nanoseconds of the GPU's clock.

    Attributes:
        name: Name of the kernel, or kind of the copy or fill.
        start_ns: Time of its start.
        end_ns: Time of its end.
        call: Number of the graph launch that ran it.
        node: Number of the node.
        graph: Number of the graph.
        stream: CUDA's number of the stream.
        program: Program of the launch that added the node; None if no launch of the plan added it.
        launch: Index of that launch in its program; None if there is none.
    """

    name: str
    start_ns: int
    end_ns: int
    call: int
    node: int
    graph: int
    stream: int
    program: str | None
    launch: int | None


class _Event(ctypes.Structure):
    """The struct Event of recorder.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("start_ns", "end_ns", "call", "node", "launch", "program", "graph", "stream", "name")
    )


def check_on_gpu(device: str) -> None:
    """Raise an error unless steps run on a GPU.

    Raises:
        MbcError: MBC365 if `device` is `cpu`, or if there is no GPU.
    """
    if device == "cpu" or current_gpu() is None:
        why = "steps run on the CPU here" if device == "cpu" else "there is no GPU here"
        raise MbcError(
            "MBC365",
            f"{why}: the work of a step is recorded on a GPU only",
            "leave out --record; `mbc doctor` shows what a GPU needs",
        )


def recording_tools(device: str) -> Toolchain:
    """Return the tools with which a recorder is built; call it before anything is planned, so that errors come early.

    Raises:
        MbcError: MBC365 if steps run on `device` `cpu`, or if this machine has no GPU or lacks a tool.
    """
    check_on_gpu(device)
    tools = find_toolchain()
    missing = [part for here, part in ((tools.gxx, GXX), (tools.cudart, CUDART), (tools.cupti, CUPTI)) if here is None]
    if missing:
        parts = " and ".join(f"{part.name} ({part.purpose})" for part in missing)
        raise MbcError("MBC365", f"steps cannot be recorded without {parts}", "; ".join(p.remedy for p in missing))
    return tools


class Recorder:
    """Records the work of graphs that are captured after it was opened, until `stop`.

    The module that captures the graphs gets `listener`. A process can have one recorder at a time. Warm-up and copies
    outside of graphs are not recorded.
    """

    def __init__(self, tools: Toolchain) -> None:
        """Compile the native part and subscribe to CUPTI.

        Raises:
            MbcError: MBC366 if CUPTI does not load or refuses, MBC367 if another tool has subscribed to it, MBC095 if
                the recorder does not compile.
        """
        self._calls = calls = _built(tools)
        for name, result in (
            ("mbc_recorder_events", ctypes.c_int64),
            ("mbc_recorder_dropped", ctypes.c_uint64),
            ("mbc_recorder_name", ctypes.c_char_p),
            ("mbc_recorder_failure", ctypes.c_char_p),
        ):
            getattr(calls, name).restype = result
        calls.mbc_recorder_name.argtypes = (ctypes.c_int64,)
        self._check(calls.mbc_recorder_open())

    @property
    def listener(self) -> int:
        """Address of the function that receives the launch of each node of a captured graph."""
        address = ctypes.cast(self._calls.mbc_recorder_node, ctypes.c_void_p).value
        assert address is not None
        return address

    def stop(self) -> tuple[Event, ...]:
        """Return the recorded events in the order of their starts; the GPU has to be idle.

        Raises:
            MbcError: MBC366 if CUPTI lost some of them.
        """
        self._check(self._calls.mbc_recorder_stop())
        dropped = int(self._calls.mbc_recorder_dropped())
        if dropped:
            raise MbcError(
                "MBC366", f"CUPTI dropped {dropped:,} records of work on the GPU", "record fewer steps, or try again"
            )
        first = ctypes.POINTER(_Event)()
        count = self._calls.mbc_recorder_events(ctypes.byref(first))
        names = [self._name(number) for number in range(max((first[i].name for i in range(count)), default=-1) + 1)]
        programs = {number: name for name, number in PROGRAMS.items()}
        events = (_event(first[i], names, programs.get(first[i].program)) for i in range(count))
        return tuple(sorted(events, key=lambda event: (event.start_ns, event.node)))

    def close(self) -> None:
        """Unsubscribe from CUPTI and delete the records."""
        self._calls.mbc_recorder_close()

    def _name(self, number: int) -> str:
        text: bytes = self._calls.mbc_recorder_name(number)
        return text.decode(errors="replace")

    def _check(self, status: int) -> None:
        if status == 0:
            return
        text: bytes = self._calls.mbc_recorder_failure()
        reason = text.decode(errors="replace")
        self.close()
        if status == _SUBSCRIBED:
            raise MbcError(
                "MBC367",
                f"another tool uses CUPTI in this process, and CUPTI serves only one tool at a time ({reason})",
                "end it (a profiler of PyTorch, Nsight, a debugger), or record without it",
            )
        remedy = "`mbc doctor` shows whether driver and toolkit are installed; CUPTI must not be newer than the driver"
        if status in _NOT_ALLOWED:
            remedy = "run as root, or let the driver allow it: NVreg_RestrictProfilingToAdminUsers=0"
        raise MbcError("MBC366", f"CUPTI refuses to record: {reason} (CUptiResult {status})", remedy)


def _event(record: _Event, names: Sequence[str], program: str | None) -> Event:
    launch = None if program is None else record.launch
    name = names[int(record.name)]
    return Event(
        name, record.start_ns, record.end_ns, record.call, record.node, record.graph, record.stream, program, launch
    )


def _built(tools: Toolchain) -> ctypes.CDLL:
    """Return the native part, compiled in about a second; its file may be removed after it was loaded."""
    parts = [part for part in (tools.cupti, tools.cudart) if part is not None]
    with tempfile.TemporaryDirectory(prefix="mbc-recorder-") as temporary:
        library = Path(temporary) / "librecorder.so"
        make_library(Recipe("", 0, (), (SOURCE,), ()), folder("templates") / "recorder", library, tools, parts)
        try:
            return load_library(library)
        except OSError as error:
            raise MbcError("MBC366", f"CUPTI does not load: {error}", "`mbc doctor` shows what is missing") from error
