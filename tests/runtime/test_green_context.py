"""Streams on a part of a GPU, with a fake of CUDA's driver: its calls, their order, and failures."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mbc.codegen.render_sources import render_module
from mbc.errors import MbcError
from mbc.runtime import green_context, open_gpu
from mbc.runtime.green_context import limited_streams
from mbc.runtime.module import Module
from tests.runtime.fake_pycuda import FakeLibrary, Gpu
from tests.runtime.nets import package, small_plan

PRIMARY, GREEN = 0x1000, 0x2000


class Libcuda:
    """A fake driver for one GPU of 132 multiprocessors.

    `fails`: the function that fails; `multiples`: multiples of multiprocessors in a part, by the kind of split.
    """

    def __init__(self, fails: str = "") -> None:
        self.called: list[str] = []
        self.splits: list[int] = []
        self.multiples = {2: 8, 0: 8}
        self.current, self.fails = PRIMARY, fails

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.called.append(name)
            if name == self.fails:
                return 801
            getattr(self, f"_{name}", lambda *_: None)(*arguments)
            return 0

        if name.startswith("_"):
            raise AttributeError(name)
        return call

    def _cuCtxGetCurrent(self, pointer: Any) -> None:
        pointer._obj.value = self.current

    def _cuCtxSetCurrent(self, context: ctypes.c_void_p) -> None:
        assert context.value is not None
        self.current = context.value

    def _cuDevSmResourceSplitByCount(
        self, part: Any, count: Any, whole: Any, rest: Any, flags: Any, least: Any
    ) -> None:
        self.splits.append(flags.value)
        multiple = self.multiples[flags.value]
        part._obj.multiprocessors = -(-least.value // multiple) * multiple
        count._obj.value = 1

    def _cuCtxFromGreenCtx(self, context: Any, green: Any) -> None:
        context._obj.value = GREEN


@pytest.fixture
def libcuda(monkeypatch: pytest.MonkeyPatch) -> Libcuda:
    library = Libcuda()
    monkeypatch.setattr(green_context.ctypes, "CDLL", lambda name: library)
    green_context._context.cache_clear()
    return library


def test_the_part_is_current_only_meanwhile(libcuda: Libcuda):
    with limited_streams(72):
        assert libcuda.current == GREEN
    assert libcuda.current == PRIMARY
    with pytest.raises(ZeroDivisionError), limited_streams(72):
        raise ZeroDivisionError
    assert libcuda.current == PRIMARY
    assert libcuda.called.count("cuGreenCtxCreate") == 1  # one part of so many for the process


def test_the_whole_gpu_needs_no_context(libcuda: Libcuda):
    with limited_streams(None):
        assert libcuda.current == PRIMARY
    assert libcuda.called == []


def test_a_driver_that_rounds_up(libcuda: Libcuda):
    with pytest.raises(MbcError, match="MBC287: this GPU cannot make a part of 66 multiprocessors: the nearest has 72"):
        limited_streams(66).__enter__()


def test_clusters_of_sixteen_run_on_it_where_the_driver_can(libcuda: Libcuda):
    with limited_streams(72):
        assert libcuda.splits == [2]
    libcuda.multiples = {2: 16, 0: 8}
    with limited_streams(56):
        assert libcuda.splits == [2, 2, 0]


@pytest.mark.parametrize("fails", ["cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuGreenCtxCreate"])
def test_a_driver_that_makes_none(libcuda: Libcuda, fails: str):
    libcuda.fails = fails
    with pytest.raises(
        MbcError, match=f"MBC287: the driver cannot make a part of the GPU: {fails} failed with CUDA error 801"
    ):
        limited_streams(72).__enter__()
    assert libcuda.current == PRIMARY


def test_a_plan_for_a_part_runs_on_streams_of_it(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[int | None] = []

    def limited(multiprocessors: int | None) -> Any:
        asked.append(multiprocessors)
        return limited_streams(None)

    monkeypatch.setattr(open_gpu, "limited_streams", limited)
    limits: list[int] = []
    monkeypatch.setattr(FakeLibrary, "limit", lambda self, count: limits.append(count), raising=False)
    whole = small_plan()
    part = replace(whole, target=replace(whole.target, gpu=f"{whole.target.gpu}@72"))
    assert part.target.gpu in render_module(part)
    for plan in (whole, part):
        Module(package(tmp_path, plan), seed=2)
    assert asked == [None, 72] and limits == [72]
