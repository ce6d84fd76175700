"""The native recorder with a fake CUPTI; the recorder's source and the headers of CUPTI are the real ones."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from mbc.codegen.toolchain import Part, Toolchain, find_toolchain

FAKE = Path(__file__).parent / "fake_cupti.cpp"
# CUpti_ActivityKind
KERNEL, COPY, FILL, PEER_COPY = 10, 1, 2, 22


def tools_or_skip() -> Toolchain:
    tools = find_toolchain()
    if tools.gxx is None or tools.cupti is None or tools.cudart is None:
        pytest.skip("needs g++ and CUPTI's headers to compile the recorder")
    return tools


@cache
def _fake_part() -> tuple[Toolchain, Path]:
    """Return a toolchain with the fake in place of libcupti, and the path of the fake. CUPTI's headers stay."""
    tools = tools_or_skip()
    assert tools.cupti is not None and tools.cudart is not None
    folder = Path(mkdtemp(prefix="mbc-fake-cupti-"))
    library = folder / "libcupti.so.99"
    includes = [f"-I{part.include}" for part in (tools.cupti, tools.cudart)]
    command = [str(tools.gxx), "-std=c++17", "-shared", "-fPIC", *includes, str(FAKE), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return replace(tools, cupti=Part(tools.cupti.include, folder, library.name)), library


@contextmanager
def fake_cupti(status: int = 0) -> Iterator[tuple[Toolchain, Any]]:
    """Return a toolchain with a fake CUPTI, and the fake itself. `status`: the error with which CUPTI refuses."""
    tools, library = _fake_part()
    fake = ctypes.CDLL(str(library))
    wide = ctypes.c_uint64
    narrow = ctypes.c_uint32
    fake.fake_ran.argtypes = (ctypes.c_int, ctypes.c_char_p, wide, wide, narrow, wide, narrow, narrow)
    fake.fake_clone.argtypes = (wide, wide)
    fake.fake_drop.argtypes = (ctypes.c_size_t,)
    fake.fake_fail(status)
    try:
        yield tools, fake
    finally:
        fake.fake_fail(0)
        fake.fake_drop(0)


def report_node(listener: int, program: int, launch: int, node: int) -> None:
    """Call the listener as a module does for each node that a launch added."""
    ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p)(listener)(program, launch, node)
