"""Memory of another GPU: used if that GPU lends it, otherwise refused with a remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mbc.errors import MbcError
from mbc.hardware.streams import Space
from mbc.plan.model import Plan
from mbc.runtime.module import Module
from tests.runtime.fake_pycuda import FakeLibrary, Gpu
from tests.runtime.nets import batch, package, small_plan
from tests.runtime.test_cuda import failure

SIZE = 5 << 20


def offloading(plan: Plan) -> Plan:
    """Return the plan with an additional buffer in a peer's memory that no launch touches."""
    away = replace(plan.buffers[0], space=Space.PEER, size_bytes=SIZE)
    return replace(
        plan, buffers=(*plan.buffers, away), offsets=(*plan.offsets, 0),
        predictions=replace(plan.predictions, peer_bytes=SIZE), peer_limit_bytes=SIZE,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return package(tmp_path, offloading(small_plan()))


@pytest.mark.parametrize("accessed", [set[int](), {1}], ids=["first", "access was enabled before"])
def test_another_gpu_lends_and_gets_back(gpu: Gpu, folder: Path, accessed: set[int]) -> None:
    gpu.count, gpu.accessed = 2, accessed
    net = Module(folder, device="cuda")
    (memory,) = (memory for memory in gpu.allocations if memory.gpu == 1)
    library = FakeLibrary.instances[0]
    assert (library.peer, library.peer_bytes) == (int(memory), SIZE)
    assert gpu.accessed == {1}
    net.step(*batch(), lr=0.1)
    assert net.memory.peer_taken == net.memory.peer_planned == SIZE
    assert "another GPU's memory 5.00 MiB (planned 5.00 MiB)" in str(net.memory)
    assert not memory.freed
    net.close()
    assert all(memory.freed for memory in gpu.allocations)


def test_without_peers_nothing_is_lent(gpu: Gpu, tmp_path: Path) -> None:
    gpu.count = 2
    net = Module(package(tmp_path, small_plan()), device="cuda")
    assert FakeLibrary.instances[0].peer == 0 and not gpu.accessed
    assert {memory.gpu for memory in gpu.allocations} == {0}
    assert "another GPU" not in str(net.memory)


def refused(gpu: Gpu, folder: Path) -> MbcError:
    error = failure(folder)
    assert not FakeLibrary.instances, "before the first step"
    assert all(memory.freed for memory in gpu.allocations)
    assert "memory.peers" in error.remedy
    return error


def test_no_other_gpu(gpu: Gpu, folder: Path) -> None:
    error = refused(gpu, folder)
    assert error.code == "MBC105" and "is the only GPU that this process sees" in error.message
    assert "CUDA_VISIBLE_DEVICES" in error.remedy


def test_no_peer_access(gpu: Gpu, folder: Path) -> None:
    gpu.count, gpu.joined = 3, False
    error = refused(gpu, folder)
    assert error.code == "MBC105" and "no peer access" in error.message
    assert "Fake (0000:01:00.0), Fake (0000:02:00.0)" in error.message


def test_less_than_promised(gpu: Gpu, folder: Path) -> None:
    gpu.count, gpu.lendable = 2, 4 << 20
    error = refused(gpu, folder)
    assert error.code == "MBC106" and "5,242,880 bytes" in error.message
    assert "but at most 4,194,304 are free on Fake" in error.message
