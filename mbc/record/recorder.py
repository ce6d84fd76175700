"""CUPTI through `templates/recorder/recorder.cpp`, which is compiled against the headers of the CUPTI that is here: how
an activity record is laid out depends on its version."""

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
    """A kernel, copy or fill that a node of a graph ran once, in nanoseconds of the GPU's clock. `call`: the number of
    the graph launch that ran it; `launch` of `program`: whose node it is; None where no launch added it to its graph.
    `stream`: the number that CUDA gave it."""

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
    """Event of recorder.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("start_ns", "end_ns", "call", "node", "launch", "program", "graph", "stream", "name")
    )


def check_on_gpu(device: str) -> None:
    """MBC365 where steps run on `device` `cpu`, or there is no GPU."""
    if device == "cpu" or current_gpu() is None:
        why = "steps run on the CPU here" if device == "cpu" else "there is no GPU here"
        raise MbcError(
            "MBC365",
            f"{why}: what a step takes is recorded on a GPU only",
            "leave out --record; `mbc doctor` says what a GPU needs",
        )


def recording_tools(device: str) -> Toolchain:
    """What a recorder is built with. MBC365 where steps run on `device` `cpu`, or this machine has no GPU or lacks a
    part: better known before anything is planned."""
    check_on_gpu(device)
    tools = find_toolchain()
    missing = [part for here, part in ((tools.gxx, GXX), (tools.cudart, CUDART), (tools.cupti, CUPTI)) if here is None]
    if missing:
        told = " and ".join(f"{part.name} ({part.purpose})" for part in missing)
        raise MbcError("MBC365", f"steps cannot be recorded without {told}", "; ".join(p.remedy for p in missing))
    return tools


class Recorder:
    """Records what graphs run that are captured from now on, until `stop`; `listener` is for the module that captures
    them. One at a time in a process. Warm-up and copies outside of graphs are left out.

    Raises MBC366 where CUPTI does not load or refuses, MBC367 where another tool has subscribed to it, MBC095 where the
    recorder does not compile.
    """

    def __init__(self, tools: Toolchain) -> None:
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
        address = ctypes.cast(self._calls.mbc_recorder_node, ctypes.c_void_p).value
        assert address is not None
        return address

    def stop(self) -> tuple[Event, ...]:
        """What was recorded, by time; the GPU has to be idle. MBC366 where CUPTI lost some of it."""
        self._check(self._calls.mbc_recorder_stop())
        dropped = int(self._calls.mbc_recorder_dropped())
        if dropped:
            raise MbcError(
                "MBC366", f"CUPTI dropped {dropped:,} records of what ran on the GPU", "record fewer steps, or again"
            )
        first = ctypes.POINTER(_Event)()
        count = self._calls.mbc_recorder_events(ctypes.byref(first))
        names = [self._name(number) for number in range(max((first[i].name for i in range(count)), default=-1) + 1)]
        programs = {number: name for name, number in PROGRAMS.items()}
        events = (_event(first[i], names, programs.get(first[i].program)) for i in range(count))
        return tuple(sorted(events, key=lambda event: (event.start_ns, event.node)))

    def close(self) -> None:
        """Give CUPTI back; what was recorded is gone."""
        self._calls.mbc_recorder_close()

    def _name(self, number: int) -> str:
        text: bytes = self._calls.mbc_recorder_name(number)
        return text.decode(errors="replace")

    def _check(self, status: int) -> None:
        if status == 0:
            return
        text: bytes = self._calls.mbc_recorder_failure()
        told = text.decode(errors="replace")
        self.close()
        if status == _SUBSCRIBED:
            raise MbcError(
                "MBC367",
                f"another tool has CUPTI in this process, which serves one at a time ({told})",
                "end it (a profiler of PyTorch, Nsight, a debugger), or record without it",
            )
        remedy = "`mbc doctor` says whether driver and toolkit are there; CUPTI must not be newer than the driver"
        if status in _NOT_ALLOWED:
            remedy = "run as root, or let the driver allow it: NVreg_RestrictProfilingToAdminUsers=0"
        raise MbcError("MBC366", f"CUPTI refuses to record: {told} (CUptiResult {status})", remedy)


def _event(record: _Event, names: Sequence[str], program: str | None) -> Event:
    launch = None if program is None else record.launch
    name = names[int(record.name)]
    return Event(
        name, record.start_ns, record.end_ns, record.call, record.node, record.graph, record.stream, program, launch
    )


def _built(tools: Toolchain) -> ctypes.CDLL:
    """Compiled in a second, once; the file may go as soon as it is loaded."""
    parts = [part for part in (tools.cupti, tools.cudart) if part is not None]
    with tempfile.TemporaryDirectory(prefix="mbc-recorder-") as made:
        library = Path(made) / "librecorder.so"
        make_library(Recipe("", 0, (), (SOURCE,), ()), folder("templates") / "recorder", library, tools, parts)
        try:
            return load_library(library)
        except OSError as error:
            raise MbcError("MBC366", f"CUPTI does not load: {error}", "`mbc doctor` says what is missing") from error
