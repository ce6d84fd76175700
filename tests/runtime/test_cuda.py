"""Inputs, figures, states, memory and errors around a program on a GPU; PyCUDA's driver is a fake."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.equivalence.launches import check_launches
from mbc.errors import MbcError
from mbc.hardware.streams import Space
from mbc.ir.types import Layout
from mbc.plan.model import Plan
from mbc.plan.prefetch import prefetch_bytes
from mbc.runtime import driver, open_gpu, pinned, usage
from mbc.runtime.arrays import DeviceArray
from mbc.runtime.bindings import find_places
from mbc.runtime.dlpack import tensor_of
from mbc.runtime.machine import Machine
from mbc.runtime.module import Module
from mbc.runtime.output import DeviceOutput
from mbc.runtime.shadow import access_region
from mbc.units import show_size
from tests.runtime.fake_pycuda import FakeLibrary, Gpu, Stream, device_bytes
from tests.runtime.nets import batch, package, same_shape_plan, small_plan


class OnDevice:
    """An array in device memory with the interface of CuPy and PyTorch."""

    def __init__(self, array: np.ndarray, **fields: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "data": (array.ctypes.data, False), "version": 3,
            "strides": None if array.flags.c_contiguous else array.strides, **fields,
        }  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_numbers_as_on_the_cpu(gpu: Gpu, tmp_path: Path, precision: str):
    plan = small_plan(precision)
    here = Module(plan, seed=2, device="cpu")
    there = Module(package(tmp_path, plan), seed=2, canaries=True)
    assert there.device == "cuda"
    # Losses are looked at in the end: until then nothing of this needs to have run.
    losses = [(here.step(*batch(seed), lr=0.05), there.step(*batch(seed), lr=0.05)) for seed in range(40)]
    for mine, theirs in losses:
        assert float(mine) == float(theirs)
    assert here.metrics == there.metrics and here.control == there.control
    for name in here.states:
        np.testing.assert_array_equal(here.state(name), there.state(name))
    image = batch(77)[0]
    for rows in (6, 2):
        np.testing.assert_array_equal(here.forward(image[:rows]), there.forward(image[:rows]))
    there.check_canaries()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("prefetch", [False, True])
def test_inputs_travel_ahead_and_arrive_in_order(gpu: Gpu, tmp_path: Path, early: bool, prefetch: bool):
    here = Module(small_plan(), seed=2, device="cpu")
    there = Module(package(tmp_path, small_plan()), seed=2, prefetch=prefetch)
    assert bool(there.memory.prefetch_taken) == prefetch
    Stream.early = early
    images: list[np.ndarray] = []
    losses: list[tuple[Any, Any]] = []
    for seed in range(20):
        image, target = batch(seed)
        if seed % 5 == 3:  # one input is on the GPU already
            image = OnDevice(image)
        losses.append((here.step(*batch(seed), lr=0.05), there.step(image, target, lr=0.05)))
        if seed % 7 == 6:
            images.append(np.asarray(there.forward(batch(100 + seed)[0][:3])))
            np.testing.assert_array_equal(here.forward(batch(100 + seed)[0][:3]), images[-1])
    for mine, theirs in losses:
        assert float(mine) == float(theirs)


def test_a_step_returns_while_the_one_before_it_waits(gpu: Gpu, tmp_path: Path):
    net = Module(package(tmp_path, small_plan()))
    float(net.step(*batch(0), lr=0.1))  # the first looks at the memory that is taken
    compute, ahead = Stream.instances[0], Stream.instances[-1]
    Stream.early = True
    began = compute.done
    losses = [net.step(*batch(seed), lr=0.1) for seed in (1, 2)]
    # Nobody waited for the GPU, and yet the inputs of the first step have arrived; those of the second wait for the
    # first to take its own, not for it to end.
    assert compute.done == began and 0 < ahead.done < len(ahead.queue)
    # The control block is written first: on one copy engine it would stand behind the inputs of the next step.
    step = FakeLibrary.instances[0].arena[find_places(small_plan()).control.offset_bytes :][:8].view(np.uint64)
    assert step[0] == 1
    while step[0] == 1:
        compute.synchronize(compute.done + 1)
    assert ahead.done < len(ahead.queue)
    programs = [i for i, call in enumerate(compute.queue) if getattr(call, "__qualname__", "").startswith("FakeLib")]
    compute.synchronize(programs[-2])
    assert ahead.done == len(ahead.queue)
    assert [float(loss) for loss in losses]


@pytest.mark.parametrize(("prefetch", "idle_s"), [(True, 0.0), (False, 0.002)])
def test_how_long_the_gpu_waited_for_a_step(gpu: Gpu, tmp_path: Path, prefetch: bool, idle_s: float):
    net = Module(package(tmp_path, small_plan()), prefetch=prefetch)
    losses = [net.step(*batch(seed), lr=0.1) for seed in range(3)]
    # Where inputs do not travel ahead their copies come between.
    assert [loss.idle_s for loss in losses] == [None, idle_s, idle_s]
    assert pickle.loads(pickle.dumps(losses[1])).idle_s == idle_s
    losses = [net.step(*batch(seed), lr=0.1) for seed in range(20)]
    assert losses[0].idle_s is None and losses[-1].idle_s == idle_s  # too late for the first one


def test_memory_for_the_inputs_of_the_next_step(gpu: Gpu, tmp_path: Path):
    plan = small_plan()
    ahead = prefetch_bytes(plan)
    assert ahead == 6 * 2 * 6 * 6 * 4 + (-6 * 2 * 6 * 6 * 4 % 256) + 256
    taken = plan.predictions.arena_bytes + plan.predictions.overhead_bytes
    assert prefetch_bytes(replace(plan, budget_bytes=taken + ahead)) == ahead
    assert prefetch_bytes(replace(plan, budget_bytes=taken + ahead - 1)) == 0
    net = Module(package(tmp_path, plan), device="cuda", canaries=True)
    assert net.memory.prefetch_taken == ahead and f"inputs of the next step {show_size(ahead)}" in str(net.memory)
    assert gpu.allocations[0].raw.size == 256 + plan.predictions.arena_bytes + 2 * open_gpu.GUARD_BYTES + ahead
    float(net.step(*batch(), lr=0.1))
    net.check_canaries()
    gpu.free = plan.predictions.arena_bytes + ahead - 1
    assert Module(tmp_path, device="cuda").memory.prefetch_taken == 0


def test_inputs_of_the_two_programs_may_share_an_offset(gpu: Gpu, tmp_path: Path):
    plan = small_plan()
    places = find_places(plan)
    end = plan.predictions.arena_bytes
    offsets = list(plan.offsets)
    for place in (places.train_inputs["target"], places.infer_inputs["image"]):
        offsets[place.buffer] = end
    taken = replace(plan.predictions, arena_bytes=end + 2048)
    net = Module(package(tmp_path, replace(plan, offsets=tuple(offsets), predictions=taken)), seed=2)
    image, target = batch()
    float(net.step(image, target, lr=0.05))
    here = Module(plan, seed=2, device="cpu")
    float(here.step(image, target, lr=0.05))
    np.testing.assert_array_equal(net.forward(image), here.forward(image))


def test_warming_up_leaves_nothing_behind(gpu: Gpu, tmp_path: Path):
    there = Module(package(tmp_path, small_plan()), seed=2, device="cuda")
    here = Module(small_plan(), seed=2, device="cpu")
    assert FakeLibrary.instances[0].calls == ["create", "warm", "capture"]
    assert here.control == there.control
    for name in here.states:
        np.testing.assert_array_equal(here.state(name), there.state(name))


def test_launch_by_launch(gpu: Gpu, tmp_path: Path):
    net = Module(package(tmp_path, small_plan()), device="cuda", eager=True)
    float(net.step(*batch(), lr=0.1))
    assert FakeLibrary.instances[0].calls == ["create", "train eager"]


def test_an_observer_sees_every_launch(gpu: Gpu, tmp_path: Path):
    plan = small_plan()
    seen: list[tuple[str, str, int]] = []

    class Counting:
        def before(self, machine: Machine, program: str, index: int) -> None:
            seen.append(("before", program, index))
            assert machine.arena_address is not None and len(machine.memory_bytes(Space.ARENA, 256, 512)) == 256

        def after(self, machine: Machine, program: str, index: int) -> None:
            seen.append(("after", program, index))

    here, there = Module(plan, device="cpu"), Module(package(tmp_path, plan), device="cuda", eager=True)
    for net in (here, there):
        net.step(*batch(), lr=0.1)
    there.observe(Counting())
    assert float(here.step(*batch(1), lr=0.1)) == float(there.step(*batch(1), lr=0.1))
    np.testing.assert_array_equal(here.forward(batch()[0]), there.forward(batch()[0]))
    for name in here.states:
        np.testing.assert_array_equal(here.state(name), there.state(name))
    launches = [("train", i) for i in range(len(plan.train.launches))]
    launches += [("infer", i) for i in range(len(plan.infer.launches))]
    assert seen == [(when, *launch) for launch in launches for when in ("before", "after")]
    there.observe(None)
    there.forward(batch()[0])
    assert FakeLibrary.instances[0].calls[-1] == "infer eager"


def test_launches_are_checked_on_the_gpu(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plan = small_plan("bf16")
    checked = check_launches(package(tmp_path, plan), "cuda", 2, 0)
    assert checked.passed and checked.device == "cuda"
    run_launch = FakeLibrary.run_launch
    index = next(i for i, launch in enumerate(plan.infer.launches) if launch.operations == ("infer.second",))
    region = access_region(plan, plan.infer.launches[index].accesses[2])

    def spoil(self: FakeLibrary, program: str, number: int) -> None:
        run_launch(self, program, number)
        if (program, number) == ("infer", index):
            self.arena[region.start : region.stop].view(np.uint16)[0] ^= 1 << 14  # of its exponent

    monkeypatch.setattr(FakeLibrary, "run_launch", spoil)
    checked = check_launches(tmp_path, "cuda", 2, 0)
    assert [(launch.program, launch.index) for launch in checked.launches if not launch.passed] == [("infer", index)]


def test_arrays_on_the_gpu(gpu: Gpu, tmp_path: Path):
    here = Module(small_plan(), device="cpu")
    there = Module(package(tmp_path, small_plan()), device="cuda")
    for seed in range(6):
        image, target = batch(seed)
        kept = OnDevice(image), OnDevice(target.astype(np.int64) | (7 << 32))
        loss = there.step(*kept, lr=0.1)
        assert float(loss) == float(here.step(image, target, lr=0.1))
        by_address = DeviceArray(image.ctypes.data, image.shape, "f4", image, None)
        image32 = by_address, OnDevice(target.astype(np.int32), stream=1)
        assert float(there.step(*image32, lr=0.1)) == float(here.step(image, target, lr=0.1))


def test_arrays_on_the_gpu_live_until_they_are_copied(gpu: Gpu, tmp_path: Path):
    here = Module(small_plan(), device="cpu")
    there = Module(package(tmp_path, small_plan()), device="cuda")
    losses = [there.step(OnDevice(batch(s)[0].copy()), OnDevice(batch(s)[1].copy()), lr=0.1) for s in range(8)]
    for seed, loss in enumerate(losses):
        assert float(loss) == float(here.step(*batch(seed), lr=0.1))


@pytest.mark.parametrize(
    ("image", "code", "message"),
    [
        (np.zeros((6, 2, 6, 6)), "MBC148", "must hold float32 on the GPU, got f8"),
        (np.zeros((6, 6, 6, 2), np.float32).transpose(0, 3, 1, 2), "MBC150", "must be contiguous, channels first"),
        (np.zeros((6, 2, 6, 5), np.float32), "MBC146", "must have the shape [rows, 2, 6, 6], got [6, 2, 6, 5]"),
    ],
)
def test_arrays_on_the_gpu_that_do_not_fit(gpu: Gpu, tmp_path: Path, image: np.ndarray, code: str, message: str):
    net = Module(package(tmp_path, small_plan()), device="cuda")
    with pytest.raises(MbcError) as caught:
        net.step(OnDevice(image), batch()[1], lr=0.1)
    assert caught.value.code == code and message in caught.value.message


def test_checkpoints_go_both_ways(gpu: Gpu, tmp_path: Path):
    here = Module(small_plan(), seed=1, device="cpu")
    there = Module(package(tmp_path, small_plan()), seed=2, device="cuda")
    here.step(*batch(), lr=0.1)
    here.save(tmp_path / "w")
    there.load(tmp_path / "w")
    assert float(here.step(*batch(1), lr=0.1)) == float(there.step(*batch(1), lr=0.1))
    there.save(tmp_path / "back")
    here.load(tmp_path / "back")


def test_memory_planned_and_taken(gpu: Gpu, tmp_path: Path):
    plan = small_plan()
    net = Module(package(tmp_path, plan), device="cuda")
    allocated = len(gpu.allocations)
    assert allocated == 1
    net.step(*batch(), lr=0.1)
    net.forward(batch()[0])
    assert len(gpu.allocations) == allocated
    assert net.memory.arena_taken == plan.predictions.arena_bytes
    assert net.memory.overhead_taken == 256  # what the fake allocation takes for its alignment
    net.close()
    net.close()
    assert all(memory.freed for memory in gpu.allocations)
    assert FakeLibrary.instances[0].calls[-1] == "destroy"


def moving(plan: Plan, size_bytes: int) -> Plan:
    """Return the plan with an additional buffer in host memory that no launch touches."""
    away = replace(plan.buffers[0], space=Space.HOST, size_bytes=size_bytes)
    taken = replace(plan.predictions, host_bytes=size_bytes)
    return replace(plan, buffers=(*plan.buffers, away), offsets=(*plan.offsets, 0), predictions=taken)


def pinned_arrays(gpu: Gpu, size_bytes: int) -> list[weakref.ref[np.ndarray]]:
    return [ref for ref in gpu.pinned if (array := ref()) is not None and array.nbytes == size_bytes]


def address(ref: weakref.ref[np.ndarray]) -> int:
    array = ref()
    assert array is not None
    return array.ctypes.data


def test_host_memory_is_pinned_once_and_given_back(gpu: Gpu, tmp_path: Path):
    plan = moving(small_plan(), 5 << 20)
    net = Module(package(tmp_path, plan), device="cuda")
    taken = pinned_arrays(gpu, 5 << 20)
    assert len(taken) == 1
    library = FakeLibrary.instances[0]
    assert (library.host, library.host_bytes) == (address(taken[0]), 5 << 20)
    for seed in range(3):
        net.step(*batch(seed), lr=0.1)
    memory = net.memory
    assert memory.host_taken == memory.host_planned == 5 << 20
    image, target = (place.size_bytes for place in find_places(plan).train_inputs.values())
    assert memory.staging_taken == 2 * (image + target)
    assert "host memory 5.00 MiB (planned 5.00 MiB)" in str(memory)
    assert pinned_arrays(gpu, 5 << 20) == taken
    net.close()
    assert taken[0]() is None
    assert FakeLibrary.instances[0].calls[-1] == "destroy"


def test_a_plan_that_moves_nothing_pins_nothing_for_it(gpu: Gpu, tmp_path: Path):
    net = Module(package(tmp_path, small_plan()), device="cuda")
    assert FakeLibrary.instances[0].host == 0 and net.memory.host_taken == 0
    assert "host memory" not in str(net.memory)


def test_too_little_host_memory(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = package(tmp_path, moving(small_plan(), 5 << 20))
    gpu.pinnable = 1 << 20
    error = failure(folder)
    assert error.code == "MBC189" and "5,242,880 bytes of pinned host memory: " in error.message
    assert "out of memory" in error.message
    assert all(memory.freed for memory in gpu.allocations)
    gpu.pinnable = 1 << 34
    monkeypatch.setattr(pinned, "available_bytes", lambda: 4 << 20)
    error = failure(folder)
    assert error.code == "MBC189" and "only 4,194,304 are available" in error.message


def test_the_systems_report_on_its_memory(tmp_path: Path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  100 kB\nMemFree:   10 kB\nMemAvailable:   64 kB\n")
    assert pinned.available_bytes(str(file)) == 64 << 10
    file.write_text("MemTotal:  100 kB\n")
    assert pinned.available_bytes(str(file)) is None
    assert pinned.available_bytes(str(tmp_path / "no")) is None


def failure(folder: Path, **settings: Any) -> MbcError:
    with pytest.raises(MbcError) as caught:
        Module(folder, device="cuda", **settings)
    return caught.value


def test_bytes_written_beside_the_arena(gpu: Gpu, tmp_path: Path):
    plan = small_plan()
    net = Module(package(tmp_path, plan), device="cuda", canaries=True)
    net.check_canaries()
    end = int(gpu.allocations[0]) + open_gpu.GUARD_BYTES + plan.predictions.arena_bytes
    device_bytes(end + 3, 2)[:] = 0
    with pytest.raises(MbcError, match="2 bytes after the arena were written, the first at 3 of the guard") as caught:
        net.check_canaries()
    assert caught.value.code == "MBC161"


def test_an_overhead_beyond_the_budget(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plan = small_plan()
    plan = replace(plan, budget_bytes=plan.predictions.arena_bytes + 100)
    net = Module(package(tmp_path, plan), device="cuda")
    with pytest.raises(MbcError) as caught:
        net.step(*batch(), lr=0.1)
    assert caught.value.code == "MBC160"
    assert "256 of overhead" in caught.value.message and "reserved" in caught.value.message
    assert "prefetch" not in caught.value.remedy


def test_an_overhead_that_leaves_no_memory_for_prefetching(gpu: Gpu, tmp_path: Path):
    plan = small_plan()
    # The overhead was thought to be less than it is.
    plan = replace(
        plan,
        budget_bytes=plan.predictions.arena_bytes + prefetch_bytes(plan) + 255,
        predictions=replace(plan.predictions, overhead_bytes=255),
    )
    with pytest.raises(MbcError) as caught:
        Module(package(tmp_path, plan), device="cuda").step(*batch(), lr=0.1)
    assert caught.value.code == "MBC160" and "prefetch=False" in caught.value.remedy
    Module(tmp_path, device="cuda", prefetch=False).step(*batch(), lr=0.1)


def test_memory_of_other_processes_is_not_the_modules(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    others = {77: 5000}

    def by_process(address: str) -> dict[int, int]:
        mine = sum(len(a.raw) for a in gpu.allocations)
        return others | ({os.getpid(): mine} if mine else {})

    monkeypatch.setattr(usage, "processes", by_process)
    monkeypatch.setattr(usage, "used_bytes", lambda address: sum(by_process(address).values()))
    plan = small_plan()
    net = Module(package(tmp_path, replace(plan, budget_bytes=plan.predictions.arena_bytes + 300)), device="cuda")
    others |= {77: 1 << 30, 78: 1 << 20}  # one takes more, another one starts
    net.step(*batch(), lr=0.1)
    assert net.memory.overhead_taken == 256


def test_memory_of_the_caller_is_not_the_modules(gpu: Gpu, tmp_path: Path):
    plan = small_plan()
    net = Module(package(tmp_path, replace(plan, budget_bytes=plan.predictions.arena_bytes + 300)), device="cuda")
    held = driver.open_driver().mem_alloc(1 << 20)
    net.step(*batch(), lr=0.1)
    assert net.memory.overhead_taken == 256
    held.free()


def test_memory_that_libraries_take_during_the_first_step_is_overhead(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plan = small_plan()
    device, taken = driver.open_driver(), []
    run = FakeLibrary.run

    def loading(library: FakeLibrary, program: str, eager: bool) -> None:
        taken.append(device.mem_alloc(1000))
        run(library, program, eager)

    monkeypatch.setattr(FakeLibrary, "run", loading)
    for room, fits in ((1512, True), (1511, False)):  # the fake allocation adds 256 bytes, to the arena as well
        budget_bytes = plan.predictions.arena_bytes + room
        folder = tmp_path / str(room)
        folder.mkdir()
        net = Module(package(folder, replace(plan, budget_bytes=budget_bytes)), device="cuda")
        if fits:
            net.step(*batch(), lr=0.1)
            assert net.memory.overhead_taken == 1512
            continue
        with pytest.raises(MbcError, match="1,512 of overhead, more than the budget") as caught:
            net.step(*batch(), lr=0.1)
        assert caught.value.code == "MBC160"


def test_memory_by_process():
    def taken(before: dict[int, int] | None, now: dict[int, int] | None) -> int | None:
        used = [None if bytes_by_pid is None else 10 + sum(bytes_by_pid.values()) for bytes_by_pid in (before, now)]
        return usage.taken_since(usage.Usage(used[0], before), usage.Usage(used[1], now))

    own = os.getpid()
    assert taken({own: 5, 1: 7}, {own: 25, 1: 3, 2: 90}) == 20
    assert taken({1: 7}, {own: 25}) == 25  # one that has ended
    assert taken({1: 7}, {1: 9, 2: 25}) == 25  # numbers of another name space: the new one
    assert taken({1: 7}, {1: 9, 2: 25, 3: 1}) == 28  # cannot be measured
    assert taken(None, {1: 9}) is None
    assert usage.taken_since(usage.Usage(3, None), usage.Usage(8, {1: 2})) == 5


@pytest.mark.parametrize("when", ["create", "warm", "capture"])
def test_no_memory_left_beside_the_arena(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str):
    def fail(*_: object) -> None:
        gpu.free = 4096
        raise MbcError("MBC159", "on the GPU: launch 3, conv0: cudaGraphInstantiate: out of memory", "")

    monkeypatch.setattr(FakeLibrary, when, fail)
    error = failure(package(tmp_path, small_plan()))
    assert error.code == "MBC155" and "bytes beside the arena for the context and libraries" in error.message
    assert "4,096 are free" in error.message and "launch 3, conv0" in error.message
    assert all(memory.freed for memory in gpu.allocations)


@pytest.mark.parametrize(
    ("capability", "binds", "runs"),
    [
        ((9, 0), False, True),
        ((9, 1), False, True),
        ((12, 0), False, True),
        ((12, 0), True, False),
        ((8, 0), False, False),
    ],
)
def test_the_gpu_must_be_of_the_planned_kind_or_newer(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], binds: bool, runs: bool
):
    gpu.capability = capability
    named = tuple(f"mbc/kernel{i} (sm_120 lacks it)" for i in range(6 * binds))
    monkeypatch.setattr("mbc.runtime.driver.binding_kernels", lambda plan, architecture: named)
    folder = package(tmp_path, small_plan())
    said = f"(sm_90); this GPU is Fake (sm_{capability[0]}{capability[1]})"
    if not runs:
        error = failure(folder)
        assert error.code == "MBC154" and said in error.message
        assert binds == ("which cannot run mbc/kernel0 (sm_120 lacks it), " in error.message)
        assert binds == ("mbc/kernel3 (sm_120 lacks it) and 2 more" in error.message)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Module(folder, device="cuda").close()
    lines = [str(one.message) for one in caught if "this GPU is" in str(one.message)]
    assert len(lines) == (capability != (9, 0))
    for line in lines:
        assert said in line and "compile with --gpu auto on this machine" in line


def test_too_little_free_memory(gpu: Gpu, tmp_path: Path):
    gpu.free = 1000
    error = failure(package(tmp_path, small_plan()))
    assert error.code == "MBC155"
    assert "only 1,000 are free on the GPU" in error.message and "memory.device" in error.remedy


def test_no_gpu(gpu: Gpu, tmp_path: Path):
    gpu.count = 0
    error = failure(package(tmp_path, small_plan()))
    assert error.code == "MBC152" and "there is no GPU to run on" in error.message
    with pytest.warns(RuntimeWarning, match="running on the CPU: there is no GPU to run on"):
        assert Module(tmp_path).device == "cpu"


def test_no_pycuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.delitem(sys.modules, "pycuda.driver", raising=False)
    error = failure(package(tmp_path, small_plan()))
    assert error.code == "MBC153" and "mbc-compiler[cuda]" in error.remedy


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_outputs_stay_on_the_gpu(gpu: Gpu, tmp_path: Path, precision: str):
    plan = small_plan(precision)
    net = Module(package(tmp_path, plan), seed=2, device="cuda")
    image = batch(3)[0][:4]
    expected = net.forward(image)
    done = Stream.instances[0].done
    shown = net.forward(image, copy=False)
    assert isinstance(shown, DeviceOutput)
    assert Stream.instances[0].done == done, "nothing waits"
    place = find_places(plan).infer_outputs["head.bias_add"]
    assert shown.shape == (4, 5) and shown.dtype == place.dtype and "on GPU 0" in repr(shown)
    np.testing.assert_array_equal(shown.numpy(), expected)
    np.testing.assert_array_equal(np.asarray(shown), expected)
    with pytest.raises(ValueError, match="NumPy has to copy"):
        np.asarray(shown, copy=False)
    address = int(gpu.allocations[0]) + place.offset_bytes
    if precision == "bf16":
        assert not hasattr(shown, "__cuda_array_interface__")
    else:
        interface = shown.__cuda_array_interface__
        assert interface["data"] == (address, False) and interface["shape"] == (4, 5)
        assert interface["strides"] == (5 * place.dtype.size_bytes, place.dtype.size_bytes)
        assert interface["typestr"] == {"fp32": "<f4", "fp16": "<f2"}[precision]
        assert interface["stream"] == net._machine.stream
    assert shown.__dlpack_device__() == (2, 0)
    tensor = tensor_of(capsule := shown.__dlpack__(stream=1))
    assert (tensor.data, tensor.ndim, tensor.bits, tensor.code) == (
        address, 2, 8 * place.dtype.size_bytes, 4 if precision == "bf16" else 2
    )  # fmt: skip
    assert [tensor.shape[i] for i in range(2)] == [4, 5] and [tensor.strides[i] for i in range(2)] == [5, 1]
    del capsule


@pytest.mark.parametrize("call", [lambda net: net.step(*batch(), lr=0.1), lambda net: net.forward(batch()[0])])
def test_an_output_is_gone_after_the_next_call(gpu: Gpu, tmp_path: Path, call: Any):
    net = Module(package(tmp_path, small_plan()), device="cuda")
    shown = net.forward(batch()[0], copy=False)
    assert isinstance(shown, DeviceOutput)
    call(net)
    for use in (lambda: shown.numpy(), lambda: shown.__dlpack__(), lambda: shown.__cuda_array_interface__):
        with pytest.raises(MbcError) as caught:
            use()
        assert caught.value.code == "MBC179" and "infer.head.bias_add" in caught.value.message
        assert "is gone: a later step or forward overwrote it" in caught.value.message


def test_an_output_feeds_another_module(gpu: Gpu, tmp_path: Path):
    # As anybody would read it: through DLPack, on a stream that has to wait for the program.
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, then = Module(package(tmp_path / "a", small_plan())), Module(package(tmp_path / "b", same_shape_plan()))
    expected = then.forward(first.forward(batch()[0]))
    np.testing.assert_array_equal(then.forward(first.forward(batch()[0], copy=False)), expected)


def test_an_output_does_not_feed_its_own_module(gpu: Gpu, tmp_path: Path):
    net = Module(package(tmp_path, same_shape_plan()), device="cuda")
    shown = net.forward(np.ones((6, 5), np.float32), copy=False)
    with pytest.raises(MbcError) as caught:
        net.forward(shown)
    assert caught.value.code == "MBC150" and "is an output of the same module" in caught.value.message


def test_a_capsule_keeps_the_output_alive(gpu: Gpu, tmp_path: Path):
    net = Module(package(tmp_path, small_plan()))
    shown = net.forward(batch()[0], copy=False)
    assert isinstance(shown, DeviceOutput)
    held, capsule = weakref.ref(shown), shown.__dlpack__()
    net.forward(batch()[0])
    del shown
    gc.collect()
    assert held() is not None
    del capsule  # nobody has taken it over, so it frees itself
    gc.collect()
    assert held() is None


def test_outputs_with_channels_last_keep_their_order(gpu: Gpu, tmp_path: Path):
    plan = small_plan()
    place = replace(find_places(plan).infer_outputs["head.bias_add"], shape=(6, 5, 2, 3), layout=Layout.CHANNELS_LAST)
    shown = DeviceOutput(place, 2, 4096, Stream(), 0, lambda: np.zeros((6, 5, 2, 3), np.float32))
    assert shown.__cuda_array_interface__["strides"] == (4 * 30, 4, 4 * 15, 4 * 5)
    assert shown.shape == (2, 5, 2, 3)
