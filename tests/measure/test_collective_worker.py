"""The process of one rank: the kernels that run beside collectives, and the order of its steps, on a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from mbc.errors import MbcError
from mbc.hardware.collective_times import ConcurrentKernel, Link
from mbc.ir.types import Layout, Precision
from mbc.kernels.base import Candidate, Request
from mbc.kernels.providers import PROVIDERS
from mbc.measure import collective_worker
from mbc.measure.collective_fleet import CollectiveTask, Measured
from mbc.measure.collective_timing import CONCURRENT_BYTES
from mbc.measure.gpu import Graph
from mbc.measure.offers import Offered
from mbc.measure.workbench import CONCURRENT_KERNELS
from mbc.profile.model import Overhead, collective_subject
from tests.measure.test_collective_timing import KERNELS_US, MAIN, ClockCommunicator, ClockGpu
from tests.measure.test_harness import Kernels, Memory, bench_of, engine
from tests.profile.profiles import IDENTITY

MIB = 1 << 20
TASK = CollectiveTask(0, 2, Link.NVLINK, Precision.BF16, "k.so", (2, 8), (4, MIB))


class Prepared(Kernels):
    """Kernels that record their preparation; each run takes 50 us of simulated time."""

    def _run(
        self, candidate: Candidate, request: Request, pointers: Sequence[int], workspace: int, accumulate: bool
    ) -> None:
        self.gpu.now_us += 50.0


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_kernels_of_four_kinds(monkeypatch: pytest.MonkeyPatch, precision: Precision) -> None:
    def offers(gpu: object, request: Request, limit_bytes: int) -> Offered:
        return Offered((engine(request), engine(request, Layout.CHANNELS_LAST)))

    def graph_of(gpu: object, body: Callable[[], None]) -> SimpleNamespace:
        return SimpleNamespace(launch=body, close=lambda: closed.append(1))

    closed: list[int] = []
    monkeypatch.setattr("mbc.measure.workbench.offers", offers)
    for place in ("workbench", "clock"):
        monkeypatch.setattr(f"mbc.measure.{place}.Graph", graph_of)
    gpu = Memory(1 << 29)
    library = Prepared(gpu)
    with bench_of(gpu, library).kernels_for_collectives(precision) as kernels:
        assert set(kernels) == set(ConcurrentKernel)
        prepared = {r.kind: (c, r) for c, r, _, _ in library.prepared}
        before = len(closed)
    assert len(closed) == before + 4
    assert set(prepared) == {"convolution", "linear", "scale", *CONCURRENT_KERNELS}
    assert prepared["convolution"][0].layouts[0] is Layout.CHANNELS_LAST
    assert prepared["batch_statistics"][0].layouts[0] is Layout.CHANNELS_LAST
    assert prepared["linear"][0].provider != PROVIDERS[-1].name  # mbc's own is not in the library
    assert {c.name for c, _ in prepared.values() if c.provider == "mbc"} == {"scale", *CONCURRENT_KERNELS}
    assert all(t.dtype is precision.working for _, r in prepared.values() for t in r.inputs)


class Machine(ClockGpu):
    """A simulated GPU. `taken`: bytes of its memory in use."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.places = 0, iter((0x1000, 0x100))
        self.driver = SimpleNamespace(mem_get_info=lambda: (1000 * MIB - self.taken, 2000 * MIB))

    def take(self, size_bytes: int) -> int:
        return next(self.places)

    def fill(self, address: int, byte: int, size_bytes: int) -> None:
        assert (address, byte, size_bytes) == (0x1000, 0, MIB)


class Joined(ClockCommunicator):
    """A communicator that takes memory, and returns most of it when it is closed."""

    def __init__(self, gpu: Machine, log: list[str], max_ctas: int) -> None:
        super().__init__(gpu)
        self.machine, self.log, self.max_ctas = gpu, log, max_ctas
        gpu.taken += 10 * max_ctas * MIB

    def close(self) -> None:
        assert len(self.machine.graphs) == len(KERNELS_US), "graphs that still hold collectives"
        self.machine.taken -= 10 * self.max_ctas * MIB - MIB  # 1 MiB stays
        self.log.append("close")

    def abort(self) -> None:
        self.log.append("abort")


class Registered:
    """Memory that a communicator can register, counted separately from the GPU's."""

    def __init__(self, nccl: object, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def free(self) -> None:
        Registered.freed.append(self.size_bytes)

    freed: ClassVar[list[int]] = []


class Reaching(Joined):
    """GPUs with access to each other's memory."""

    reaches = True

    def register(self, address: object, size_bytes: int) -> bool:
        self.log.append(f"register {size_bytes}")
        return self.reaches


class Apart(Reaching):
    reaches = False

    def close(self) -> None:
        if self.max_ctas:
            super().close()
        else:  # no graph was made
            self.log.append("close")


def worked(
    monkeypatch: pytest.MonkeyPatch, communicator: type[Joined] = Joined, task: CollectiveTask = TASK
) -> tuple[list[Any], list[str]]:
    """Return the messages of a process and the log of its actions, in order."""
    gpu: Any = Machine()
    said: list[Any] = []
    log: list[str] = []

    @contextmanager
    def opened(*_: object):
        yield gpu

    @contextmanager
    def kernels(precision: Precision):
        graphs = {k: Graph(gpu, lambda us=us: gpu.enqueue(MAIN, us)) for k, us in KERNELS_US.items()}
        try:
            yield graphs
        finally:
            for graph in graphs.values():
                graph.close()

    @contextmanager
    def bench(gpu: object, open_library: object):
        yield SimpleNamespace(
            kernels_for_collectives=kernels, warm=lambda precision: log.append("warm"), identity=lambda: IDENTITY
        )

    def join(nccl: object, unique_id: bytes, rank: int, size: int, max_ctas: int, timeout_s: float) -> Joined:
        log.append(f"join {unique_id.decode()} {rank}/{size} {max_ctas}")
        return communicator(gpu, log, max_ctas)

    def connect(communicator: Joined, address: object, sizes_bytes: Sequence[int], stream: int) -> None:
        log.append(f"connect {address:x} {sizes_bytes}" if isinstance(address, int) else "connect registered")

    ids = iter((b"a", b"b"))
    monkeypatch.setattr(collective_worker, "Gpu", opened)
    monkeypatch.setattr(collective_worker, "Bench", bench)
    monkeypatch.setattr(collective_worker, "Communicator", join)
    monkeypatch.setattr(collective_worker, "connect", connect)
    monkeypatch.setattr(
        collective_worker,
        "load_nccl",
        lambda: SimpleNamespace(version=22803, has_copies=True, unique_id=lambda: next(ids)),
    )
    monkeypatch.setattr(collective_worker, "SETTLED_S", 0.0)

    answers = collective_worker.measure(task, said.append)
    try:
        _, unique_ids = next(answers)
        said += [answers.send(asked) for asked in zip(task.max_ctas, unique_ids, strict=True)]
        answers.close()
    except MbcError as error:
        said.append(error.code)
    assert not gpu.graphs
    return said, log


def rows_of(said: list[Any]) -> list[Measured]:
    return [one for one in said if isinstance(one, Measured) and one.times]


def test_one_communicator_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    said, log = worked(monkeypatch)
    connected = "connect 1000 (4, 1048576)"
    assert log == ["warm", "join a 0/2 2", connected, "close", "join b 0/2 8", connected, "close"]
    assert said[0] == "2 GPUs over nvlink, NCCL 2.28.3"
    rows = rows_of(said)
    assert [{t.max_ctas for t in results.times} for results in rows] == [{2}, {8}]
    assert all(len(results.times) == 6 and len(results.slowdowns) == 4 for results in rows)
    # Memory that the first communicator leaves counts for the second.
    assert [results.overheads for results in rows] == [
        (Overhead("collectives", collective_subject(2, 2), 20 * MIB),),
        (Overhead("collectives", collective_subject(2, 8), 81 * MIB),),
    ]


BY_COPIES = replace(TASK, max_ctas=(0, 2))


def test_copies_go_between_registered_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_worker, "SymmetricMemory", Registered)
    monkeypatch.setattr(Registered, "freed", [])
    said, log = worked(monkeypatch, Reaching, BY_COPIES)
    registered = f"register {CONCURRENT_BYTES}"
    assert log[:6] == ["warm", "join a 0/2 0", registered, registered, "connect registered", "close"]
    assert Registered.freed == [CONCURRENT_BYTES] * 2
    assert [{t.max_ctas for t in results.times} for results in rows_of(said)] == [{0}, {2}]


def test_gpus_that_do_not_reach_each_other_have_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_worker, "SymmetricMemory", Registered)
    monkeypatch.setattr(Registered, "freed", [])
    said, log = worked(monkeypatch, Apart, BY_COPIES)
    assert "these GPUs cannot access each other's memory: no collectives by copy engines" in said
    registered = f"register {CONCURRENT_BYTES}"
    assert log[:5] == ["warm", "join a 0/2 0", registered, registered, "close"]
    assert len(Registered.freed) == 2  # and the rest is measured
    assert [{t.max_ctas for t in results.times} for results in rows_of(said)] == [{2}]


def test_a_rank_that_fails_aborts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Joined):
        def all_gather(self, address: int, count: int, stream: int) -> None:
            raise MbcError("MBC272", "NCCL failed")

    said, log = worked(monkeypatch, Failing)
    assert log[-1] == "abort" and said[-1] == "MBC272"
