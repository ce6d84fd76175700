"""A module as one of several ranks on a simulated GPU: PyCUDA's driver, the library and NCCL are fakes.

The other rank has equal rows, so the sum over both ranks is twice this rank's value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mbc.compiler import compile_plans
from mbc.errors import MbcError
from mbc.hardware.streams import Stream
from mbc.options import Options
from mbc.plan.collectives import ctas_of
from mbc.plan.model import Plan
from mbc.runtime import connection, cuda
from mbc.runtime.library import RanksInterface
from mbc.runtime.membership import Membership
from mbc.runtime.module import Module
from mbc.source import Source
from tests.ops.twins import Twins
from tests.runtime import fake_pycuda
from tests.runtime.fake_pycuda import FakeLibrary, Gpu
from tests.runtime.nets import SMALL, batch, package

FUNCTIONS = (
    "ncclAllReduce", "ncclAlltoAll", "ncclAllGather", "ncclReduceScatter", "ncclReduce", "ncclBroadcast",
    "ncclCommGetAsyncError", "ncclGetErrorString", "ncclGroupStart", "ncclGroupEnd",
)  # fmt: skip
COMMUNICATOR = 77
calls: list[str] = []  # of everything below, in their order


@cache
def plan_of_two() -> Plan:
    (plan,) = compile_plans(Source("small.mbc", SMALL.replace("batch = 6", "batch = 12")), Options(gpu="h200", gpus=2))
    return plan


class Twice:
    """A group of this rank and another one that does the same. `dead`: whether the other rank has failed."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.size, self.dead = rank, 2, False
        self.facts: dict[str, str] = {}
        self.acts: list[Callable[[], None]] = []

    def agree(self, facts: Mapping[str, str]) -> None:
        calls.append(f"agree on {', '.join(facts)}")
        self.facts |= facts

    def differ(self, what: str, value: str) -> None:
        calls.append(f"differ in {what}")
        self.facts[what] = value

    def broadcast(self, payload: bytes) -> bytes:
        calls.append(f"broadcast {len(payload)}")
        return payload or b"\1" * 128

    def gather(self, payload: bytes) -> tuple[bytes, ...]:
        return payload, payload

    def sum_on_host(self, array: NDArray[Any]) -> NDArray[Any]:
        return 2 * array

    def gather_on_host(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.stack([array, array])

    def check(self) -> None:
        if self.dead:
            raise MbcError("MBC264", "rank 1 of 2 failed: it ended", "see what that rank said")

    def on_failure(self, act: Callable[[], None]) -> None:
        self.acts.append(act)


class FakeNccl:
    version = 22703

    def unique_id(self) -> bytes:
        return b"\1" * 128

    def address(self, name: str) -> int:
        return 11 + FUNCTIONS.index(name)


class FakeCommunicator:
    """The part of `mbc.runtime.communicator.Communicator` that a module uses."""

    instances: list[FakeCommunicator] = []  # noqa: RUF012
    fails_to_close = False

    def __init__(self, nccl: FakeNccl, identity: bytes, rank: int, size: int, max_ctas: int) -> None:
        assert identity == nccl.unique_id()
        calls.append(f"connect {rank} of {size}, {max_ctas} thread blocks")
        self.handle, self.rank = COMMUNICATOR, rank
        FakeCommunicator.instances.append(self)

    def check(self) -> bool:
        return True

    def gather_parts(self, address: int, part_bytes: int, size_bytes: int, stream: int) -> None:
        """Copy this rank's part to the place of the other rank's part, because both ranks have equal values."""
        calls.append(f"gather {size_bytes} bytes from parts of {part_bytes}")
        whole = fake_pycuda.device_bytes(address, size_bytes)
        own = whole[self.rank * part_bytes : (self.rank + 1) * part_bytes].copy()
        other = whole[(1 - self.rank) * part_bytes : (2 - self.rank) * part_bytes]
        other[:] = own[: other.size]

    def abort(self) -> None:
        calls.append("abort")
        self.handle = 0

    def close(self) -> None:
        calls.append("close communicator")
        if self.fails_to_close:
            raise MbcError("MBC273", "rank 0 of 2 has waited 60 s for the other ranks", "look")


class RecordingLibrary(FakeLibrary):
    collectives = Twins()
    fails_at = ""

    def record(self, call: str) -> None:
        calls.append(call)
        if call == self.fails_at:
            raise MbcError("MBC159", "on the GPU: bad luck", "see `mbc doctor`")

    def create(self, *arguments: Any, **named: Any) -> None:
        self.record("create")
        super().create(*arguments, **named)

    def warm(self) -> None:
        self.record("warm")
        super().warm()

    def capture(self, listener: int | None = None) -> None:
        self.record("capture")
        super().capture(listener)

    def destroy(self) -> None:
        self.record("destroy graphs")
        super().destroy()


@pytest.fixture
def fakes(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    calls.clear()
    monkeypatch.setattr(FakeCommunicator, "instances", [])
    monkeypatch.setattr(cuda, "Library", RecordingLibrary)
    monkeypatch.setattr(connection, "load_nccl", FakeNccl)
    monkeypatch.setattr(connection, "Communicator", FakeCommunicator)
    monkeypatch.setattr(fake_pycuda.Stream, "polled", True)
    return gpu


def opened(tmp_path: Path, ranks: Membership, **options: Any) -> Module:
    return Module(package(tmp_path, plan_of_two()), seed=2, device="cuda", ranks=ranks, **options)


def test_the_same_numbers_as_on_the_cpu(fakes: Gpu, tmp_path: Path):
    here = Module(plan_of_two(), seed=2, device="cpu", ranks=Twice())
    there = opened(tmp_path, Twice(), canaries=True)
    losses = [(here.step(*batch(seed), lr=0.05), there.step(*batch(seed), lr=0.05)) for seed in range(20)]
    for mine, theirs in losses:
        assert float(mine) == float(theirs)
    assert here.metrics == there.metrics
    for name in here.states:
        np.testing.assert_array_equal(here.state(name), there.state(name))
    there.check_canaries()


def test_the_rows_of_all_ranks_are_not_those_of_one():
    net = Module(plan_of_two(), device="cpu", ranks=Twice(1))
    image, target = batch()
    with pytest.raises(MbcError) as caught:
        net.step(np.concatenate([image, image]), np.concatenate([target, target]), lr=0.1)
    assert caught.value.code == "MBC147" and caught.value.message == (
        "input 'image' has 12 rows, a step of rank 1 takes exactly 6, of 12 that 2 ranks share"
    )
    assert caught.value.remedy.startswith("pass rows [6:12] of each mini-batch")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sharded_state_is_gathered_by_way_of_its_parameter(fakes: Gpu, tmp_path: Path, rank: int):
    source = SMALL.replace("batch = 6", "batch = 12").replace("conv(4, 3, pad=1) @first", "conv(64, 3, pad=1) @wide")
    source = source.replace("conv(4, 3, pad=1, bias=true)", "conv(64, 3, pad=1)")
    settings = (("train.shard_optimizer", "true"), ("train.precision", "bf16"))
    (plan,) = compile_plans(Source("small.mbc", source), Options(gpu="h200", gpus=2, settings=settings))
    net = Module(package(tmp_path, plan), device="cuda", ranks=Twice(rank), canaries=True)
    name = "second.weight.momentum"
    before = {state: net.state(state) for state in net.states if not state.endswith("momentum")}
    given = np.random.default_rng(1).normal(0, 1, net.states[name]).astype(np.float32)
    assert given.shape == before["second.weight"].shape == (64, 64, 3, 3)
    net.set_state(name, given)
    half = given[32:] if rank else given[:32]
    np.testing.assert_array_equal(net.state(name), np.concatenate([half, half]))
    for state, array in before.items():
        np.testing.assert_array_equal(net.state(state), array)
    assert calls[-1] == f"gather {given.nbytes} bytes from parts of {given.nbytes // 2}"
    net.save(tmp_path / "weights.safetensors")
    assert (tmp_path / "weights.safetensors").exists() is (rank == 0) and "gather" in calls[-1]
    net.check_canaries()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_connect_before_the_library_and_part_after_it(fakes: Gpu, tmp_path: Path, rank: int):
    ranks = Twice(rank)
    ctas = ctas_of(plan_of_two().train)
    assert ctas
    net = opened(tmp_path, ranks)
    assert calls == [
        "agree on mbc, plan", "agree on driver, cuDNN, NCCL", "differ in GPU", f"broadcast {128 * (rank == 0)}",
        f"connect {rank} of 2, {ctas} thread blocks", "create", "warm", "capture",
    ]  # fmt: skip
    assert [ranks.facts[name] for name in ("driver", "cuDNN", "NCCL")] == ["13.0", "91900", "22703"]
    assert re.fullmatch(r"\S+ 0000:00:00\.0", ranks.facts["GPU"])  # of which machine, too
    passed = FakeLibrary.instances[-1].ranks
    assert isinstance(passed, RanksInterface)
    assert [getattr(passed, name) for name, *_ in RanksInterface._fields_] == [
        *range(11, 21), COMMUNICATOR, rank, 2,
    ]  # fmt: skip
    assert len(fake_pycuda.Stream.instances) == len(Stream) + 1  # those of the plan, and that of inputs
    net.close()
    assert calls[8:] == ["destroy graphs", "close communicator"]
    assert all(memory.freed for memory in fakes.allocations)
    net.close()
    assert len(calls) == 10


def test_a_module_alone_has_no_communicator(fakes: Gpu, tmp_path: Path):
    (plan,) = compile_plans(Source("small.mbc", SMALL), Options(gpu="h200"))
    with Module(package(tmp_path, plan), device="cuda"):
        assert FakeLibrary.instances[-1].ranks is None
    assert calls == ["create", "warm", "capture", "destroy graphs"]


@pytest.mark.parametrize("call", ["create", "warm", "capture"])
def test_a_rank_that_cannot_be_built_waits_for_nobody(
    fakes: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
):
    """The other ranks are still working, so an orderly end would time out and hide the reason."""
    monkeypatch.setattr(RecordingLibrary, "fails_at", call)
    with pytest.raises(MbcError, match="bad luck") as caught:
        opened(tmp_path, Twice())
    assert caught.value.code == "MBC159"
    assert calls[-3:] == [call, "destroy graphs", "abort"]
    assert all(memory.freed for memory in fakes.allocations)


def test_memory_is_given_back_where_another_rank_does_not_come_to_the_end(
    fakes: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    net = opened(tmp_path, Twice())
    monkeypatch.setattr(FakeCommunicator, "fails_to_close", True)
    with pytest.raises(MbcError, match="has waited 60 s"):
        net.close()
    assert all(memory.freed for memory in fakes.allocations)


def test_waiting_ends_when_another_rank_fails(fakes: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ranks = Twice()
    net = opened(tmp_path, ranks)
    assert float(net.step(*batch(0), lr=0.05)) > 0
    loss = net.step(*batch(1), lr=0.05)
    monkeypatch.setattr(fake_pycuda.Stream, "polled", False)  # the GPU waits for the other rank
    ranks.dead = True
    for wait in (lambda: float(loss), lambda: net.state("first.weight"), net.close):
        with pytest.raises(MbcError, match="rank 1 of 2 failed: it ended") as caught:
            wait()
        assert caught.value.code == "MBC264"
    (act,) = ranks.acts
    act()  # what the listening thread of the group does
    assert calls[-1] == "abort"


@pytest.mark.parametrize(("dies", "code"), [(False, "MBC272"), (True, "MBC264")])
def test_the_rank_that_failed_is_named_rather_than_the_abort_that_it_caused(
    fakes: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool, code: str
):
    ranks = Twice()
    net = opened(tmp_path, ranks)
    float(net.step(*batch(0), lr=0.05))  # the first looks at the memory that is taken
    loss = net.step(*batch(1), lr=0.05)

    def check(_: FakeCommunicator) -> bool:
        ranks.dead = dies  # between the two questions
        raise MbcError("MBC272", "the communicator was aborted", "see the messages of the rank that failed")

    monkeypatch.setattr(FakeCommunicator, "check", check)
    monkeypatch.setattr(fake_pycuda.Stream, "polled", False)
    with pytest.raises(MbcError) as caught:
        float(loss)
    assert caught.value.code == code
