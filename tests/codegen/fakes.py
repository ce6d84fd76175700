"""Generated host code, compiled with g++ alone against the recording fakes of `fake/`, and run.

`run_against_fake` returns the calls of the code, `expected_log` the calls that the plan requires. The two share nothing
but the plan: offsets are computed again here, from shapes.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from mbc.codegen.build import host_files
from mbc.codegen.launch_headers import write_launch_headers
from mbc.codegen.render_sources import render, render_kernel_library
from mbc.codegen.view import CUDNN_LIBRARIES, KERNEL_LIBRARIES, LIBRARIES, PEER_BASE, View, view
from mbc.hardware.streams import Space, Stream
from mbc.ir.graph import Operation
from mbc.kernels.base import Provider
from mbc.kernels.cuda import symbol_of
from mbc.plan.kernel_call import call_of
from mbc.plan.model import Copy, Kernel, Launch, Plan, Program
from mbc.resources import folder
from mbc.runtime.library import RanksInterface
from tests.objects import kept_object

FAKE = Path(__file__).parent / "fake"
ARENA = 1 << 40  # an address; nothing is ever read there
HOST = 1 << 44
PEER = HOST + PEER_BASE  # so that the log has offsets as rows have them
COMMUNICATOR = 77
STREAMS = tuple(Stream)
PROGRAMS = ("train", "infer")


@dataclass(frozen=True)
class Call:
    """One launch as the fakes recorded it. `details`: what the library's call recorded about itself, by name."""

    name: str
    stream: int
    offsets: tuple[int, ...]
    integers: tuple[int, ...] = ()
    details: tuple[tuple[str, str], ...] = ()

    def detail(self, name: str) -> str:
        return dict(self.details)[name]


@dataclass(frozen=True)
class Wait:
    """A wait of `stream` for a launch of another stream, or, for launch -1, for the work before the program."""

    stream: int
    launch: int


Log = tuple[Call | Wait, ...]


@dataclass(frozen=True)
class Run:
    """The calls of each program: `eager` if run launch by launch, `captured` if captured into a graph."""

    eager: Mapping[str, Log]
    captured: Mapping[str, Log]
    replayed: tuple[str, ...]


# Its own fakes come first, also in a process where another test has loaded the real libraries.
SHARED = ("-shared", "-Wl,-Bsymbolic")


def run_against_fake(plan: Plan, folder: Path, providers: Mapping[str, Provider] | None = None) -> Run:
    """Generate and compile the code, create a module, run and capture it; fail the test on any error."""
    library = compile_against_fake(view(plan, providers), folder)
    with loaded(
        library, has_everything=True, several_ranks=0 if plan.graph.ranks is None else plan.graph.ranks.size
    ) as (lib, module):
        eager: dict[str, Log] = {}
        for number, name in enumerate(PROGRAMS):
            lib.fake_reset(ctypes.c_void_p(ARENA), ctypes.c_void_p(HOST))
            assert lib.mbc_run_eager(module, number) == 0, lib.mbc_last_error(module)
            eager[name] = parse_log(lib.fake_log().decode())
        lib.fake_reset(ctypes.c_void_p(ARENA), ctypes.c_void_p(HOST))
        assert lib.mbc_warm(module) == 0, lib.mbc_last_error(module)
        lib.fake_reset(ctypes.c_void_p(ARENA), ctypes.c_void_p(HOST))
        assert lib.mbc_capture(module) == 0, lib.mbc_last_error(module)
        captures = re.findall(r"begin capture\n(.*?)end capture\n", lib.fake_log().decode(), re.S)
        captured = {name: parse_log(text) for name, text in zip(PROGRAMS, captures, strict=True)}
        lib.fake_reset(ctypes.c_void_p(ARENA), ctypes.c_void_p(HOST))
        for number in range(len(PROGRAMS)):
            assert lib.mbc_run(module, number) == 0, lib.mbc_last_error(module)
        return Run(eager, captured, tuple(lib.fake_log().decode().splitlines()))


def compile_against_fake(rows: View, folder: Path) -> Path:
    """Return the shared library of `rows`, linked to the fakes. Skip the test if there is no g++."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to compile the generated host code")
    folder.mkdir(parents=True, exist_ok=True)
    sources = render(rows, "test")
    (folder / "program.cpp").write_text(sources["program.cpp"])
    _write_launchers(rows.symbols, folder)
    objects = _static_objects()
    chosen = [objects[name] for name in (*host_files(rows), *(path.name for path in sorted(FAKE.glob("*.cpp"))))]
    library = folder / "libfake.so"
    _compile([str(folder / "program.cpp"), str(folder / "launchers.cpp"), *map(str, chosen)], library, *SHARED)
    return library


def compile_kernels_against_fake(symbols: tuple[str, ...], folder: Path) -> Path:
    """Return the library that measuring calls, with these launchers, linked to the fakes. Skip the test without g++."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to compile the host code")
    (folder / "kernel_library.cpp").write_text(render_kernel_library())
    _write_launchers(symbols, folder)
    objects = [str(path) for name, path in _static_objects().items() if name != "module.cpp"]
    library = folder / "libkernels.so"
    _compile([str(folder / "kernel_library.cpp"), str(folder / "launchers.cpp"), *objects], library, *SHARED)
    return library


def _write_launchers(symbols: tuple[str, ...], folder: Path) -> None:
    launchers = "".join(
        f'extern "C" const char* {symbol}(const MbcCall& call) {{ return fake_kernel("{symbol}", call); }}\n'
        for symbol in symbols
    )
    (folder / "launchers.cpp").write_text(f'#include "fake.h"\n{launchers}')


def compile_fakes(folder: Path) -> Path:
    """Compile the fakes alone, for code that calls cuDNN through ctypes. Skip the test if there is no g++."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to compile the fakes")
    library = folder / "libfake.so"
    objects = _static_objects()
    _compile([str(objects[path.name]) for path in sorted(FAKE.glob("*.cpp"))], library, *SHARED)
    return library


def _command() -> tuple[str, ...]:
    templates = folder("templates")
    includes = (f"-I{path}" for path in (FAKE, templates / "include", templates / "host"))
    return ("g++", "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-fPIC", *includes)


def _compile(inputs: list[str], output: Path, *flags: str) -> None:
    done = subprocess.run([*_command(), *flags, *inputs, "-o", str(output)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@functools.cache
def _static_objects() -> dict[str, Path]:
    """Return the objects that are equal for all plans, by the names of their sources."""
    sources = (*sorted((folder("templates") / "host").glob("*.cpp")), *sorted(FAKE.glob("*.cpp")))
    with tempfile.TemporaryDirectory() as headers:
        write_launch_headers(Path(headers))
        return {source.name: kept_object((*_command(), f"-I{headers}"), source) for source in sources}


class loaded:
    """Yield the library and a module of it; both are released at the end.

    With `has_everything` the fake libraries have every algorithm that a measured plan names. With `several_ranks` the
    module gets a communicator of that number of ranks.
    """

    def __init__(self, library: Path, has_everything: bool = False, several_ranks: int = 0) -> None:
        self.lib = ctypes.CDLL(str(library))
        for name in ("fake_log", "mbc_last_error"):
            getattr(self.lib, name).restype = ctypes.c_char_p
        self.lib.mbc_last_error.argtypes = [ctypes.c_void_p]
        self.lib.mbc_arena_bytes.restype = ctypes.c_uint64
        self.lib.mbc_host_bytes.restype = ctypes.c_uint64
        self.lib.mbc_peer_bytes.restype = ctypes.c_uint64
        self.lib.mbc_cudnn_version.restype = ctypes.c_size_t
        self.module = ctypes.c_void_p()
        if has_everything:
            self.lib.fake_have_everything()
        self.ranks = RanksInterface(communicator=COMMUNICATOR, rank=1, ranks=several_ranks) if several_ranks else None
        if self.ranks is not None:
            self.lib.fake_nccl(ctypes.byref(self.ranks))

    def create(self, arena: int = ARENA, arena_bytes: int | None = None) -> int:
        streams = (ctypes.c_void_p * len(STREAMS))(*range(1, len(STREAMS) + 1))
        size = self.lib.mbc_arena_bytes() if arena_bytes is None else arena_bytes
        self.lib.fake_reset(ctypes.c_void_p(arena), ctypes.c_void_p(HOST))
        return self.lib.mbc_create(
            ctypes.c_void_p(arena),
            ctypes.c_uint64(size),
            ctypes.c_void_p(HOST),
            ctypes.c_uint64(self.lib.mbc_host_bytes()),
            ctypes.c_void_p(PEER),
            ctypes.c_uint64(self.lib.mbc_peer_bytes()),
            streams,
            None if self.ranks is None else ctypes.byref(self.ranks),
            ctypes.byref(self.module),
        )

    def __enter__(self) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
        assert self.create() == 0, self.lib.mbc_last_error(None).decode()
        return self.lib, self.module

    def __exit__(self, *_: object) -> None:
        self.lib.mbc_destroy(self.module)


def parse_log(text: str) -> Log:
    """The lines of a log as calls and waits; a detail line goes to the launch before it."""
    entries: list[Call | Wait] = []
    for line in text.splitlines():
        kind, *words = line.split()
        fields = dict(word.split("=", 1) for word in words if "=" in word)
        if kind == "wait":
            entries.append(Wait(int(fields["stream"]), int(fields["launch"])))
        elif kind == "detail":
            last = entries[-1]
            assert isinstance(last, Call)
            entries[-1] = Call(
                last.name, last.stream, last.offsets, last.integers, (*last.details, (words[0], " ".join(words[1:])))
            )
        elif kind == "launch":
            entries.append(_call(words[1], fields))
    return tuple(entries)


def _call(name: str, fields: dict[str, str]) -> Call:
    offsets = _integers(fields.pop("offsets"))
    stream = int(fields.pop("stream"))
    return Call(name, stream, offsets, _integers(fields.pop("integers", "")), tuple(fields.items()))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word)


def expected_log(plan: Plan, name: str) -> Log:
    """Return names, streams, offsets and waits of a program, from the plan alone. Integers are left out."""
    program: Program = getattr(plan, name)
    waits: dict[int, list[int]] = {}
    for earlier, later in program.waits:
        waits.setdefault(later, []).append(earlier)
    others = sorted({STREAMS.index(launch.stream) for launch in program.launches} - {0})
    log: list[Call | Wait] = [Wait(stream, -1) for stream in others]
    last = dict.fromkeys(range(len(STREAMS)), -1)
    for number, launch in enumerate(program.launches):
        stream = STREAMS.index(launch.stream)
        log += [Wait(stream, earlier) for earlier in sorted(waits.get(number, ()))]
        offsets = tuple(_offset(plan, access.buffer, access.rows.start) for access in launch.accesses)
        if isinstance(launch.work, Kernel) and launch.work.provider == "nccl":
            # Each operand to where it is gathered; a bucket in place, from where it begins; what copies bring goes to
            # workspace.
            by_copies = dict(launch.work.settings)["ctas"] == 0
            if launch.work.name == "gather_parts":  # a part and where it goes by turns, then the results
                offsets = (offsets[0], offsets[len(offsets) * 2 // 3])
            elif launch.work.name in ("all_gather", "reduce_scatter"):
                offsets = (offsets[0], offsets[len(offsets) // 2])
            else:
                offsets = (min(offsets[:-1] if by_copies else offsets), offsets[-1] if by_copies else min(offsets))
        log.append(Call(_name(plan, name, launch), stream, offsets))
        last[stream] = number
    log += [Wait(0, last[stream]) for stream in others]
    return tuple(log)


def _name(plan: Plan, program: str, launch: Launch) -> str:
    if isinstance(launch.work, Copy):
        return "copy"
    if launch.work.provider in LIBRARIES:
        return launch.work.provider
    operations: Iterable[Operation] = getattr(plan.graph, "infer" if program == "infer" else "train")
    call = call_of(plan, launch, {operation.name: operation for operation in operations})
    return symbol_of(launch.work.provider, call.name, call.request)


def _offset(plan: Plan, number: int, row: int) -> int:
    buffer = plan.buffers[number]
    offset = plan.offsets[number]
    if buffer.value is not None and plan.graph.values[buffer.value].per_sample:
        shape = plan.graph.values[buffer.value].type.shape
        offset += (row - buffer.rows.start) * math.prod(shape[1:]) * buffer.dtype.size_bytes
    if buffer.space is Space.ARENA:
        return offset
    return -1 - offset - (PEER_BASE if buffer.space is Space.PEER else 0)


def as_planned(log: Log) -> Log:
    """Return the log as the plan describes it: operands in the plan's order, workspace as the last offset.

    A filter gradient that a library computes in the workspace gets the address of its operand in the plan, and so do
    statistics that are computed from sums in the workspace. Integers are left out.
    """
    return tuple(_as_planned(entry) if isinstance(entry, Call) else entry for entry in log)


def assert_as_planned(run: Run, plan: Plan) -> None:
    """Assert that the calls of both programs are those of the plan, captured or not."""
    for name in PROGRAMS:
        assert as_planned(run.eager[name]) == as_planned(run.captured[name]) == expected_log(plan, name)


def _as_planned(call: Call) -> Call:
    if call.name not in KERNEL_LIBRARIES:
        return Call(call.name, call.stream, call.offsets)
    details = dict(call.details)
    offsets = call.offsets
    workspace = (int(details["workspace"]),) if "workspace" in details else ()
    if call.name in CUDNN_LIBRARIES:
        image, filter_, result = offsets
        if "mbc_widen" in details:
            source, filter_ = _integers(details["mbc_widen"].split()[0].removeprefix("offsets="))
            workspace = (source,)
        statistics: tuple[int, ...] = ()
        if "mbc_moments" in details:
            source, *made_of = _integers(details["mbc_moments"].split()[0].removeprefix("offsets="))
            workspace, statistics = (source,), tuple(made_of)
        named = {"forward": (image, filter_, result), "backward_data": (result, filter_, image)}
        offsets = (*named.get(details["pass"], (image, result, filter_)), *statistics)
    elif details["transposed"] != "0,1":  # cuBLASLt multiplies the other way round: w before x, w before dy
        offsets = (offsets[1], offsets[0], offsets[2])
    return Call(call.name, call.stream, (*offsets, *workspace))
