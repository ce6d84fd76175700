"""Two real GPUs: one trains, the other one lends its memory; and the copies between them are measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.hardware.streams import Stream
from mbc.ir.types import Precision
from mbc.measure.gpu import Gpu
from mbc.measure.workbench import Bench
from mbc.options import Options
from mbc.plan.model import Plan
from mbc.runtime.module import Module
from mbc.runtime.nvml import used_bytes
from mbc.source import Source
from tests.gpu.packages import built, need_gpu
from tests.gpu.test_module import SOURCE, TOLERANCES, batch, distance

STEPS = 3


@pytest.fixture(scope="module")
def two_gpus() -> None:
    need_gpu()
    driver = pytest.importorskip("pycuda.driver")
    if driver.Device.count() < 2 or not driver.Device(0).can_access_peer(driver.Device(1)):
        pytest.skip("needs two GPUs that reach each other directly")


def planned(precision: str) -> Plan:
    """Return a plan within 0.8 of the arena of the plan without a limit, which may only offload to a peer."""

    def plan(*settings: tuple[str, str]) -> Plan:
        without = frozenset({"recompute", "micro_batches"})
        chosen = (("train.precision", precision), *settings)
        return compile_plan(Source("small.mbc", SOURCE), Options(settings=chosen, without=without))

    free = plan().predictions
    budget_bytes = int(0.8 * free.arena_bytes) + free.overhead_bytes
    return plan(("memory.device", f"{budget_bytes} B"), ("memory.host", "0 B"), ("memory.peers", "1 GB"))


@pytest.fixture(scope="module")
def package(two_gpus: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = planned("fp32")
    streams = {launch.stream for launch in plan.train.launches}
    assert {Stream.TO_PEER, Stream.FROM_PEER} <= streams and plan.predictions.peer_bytes
    return built(plan, tmp_path_factory.mktemp("packages") / "lent")


@pytest.fixture(scope="module")
def bench(two_gpus: None, gpu: Gpu) -> Iterator[Bench]:
    with Bench(gpu) as peer_bench:
        yield peer_bench


def test_a_step_is_the_interpreter_s(package: Path) -> None:
    nets = [
        Module(package, seed=4, device="cuda"), Module(package, seed=4, device="cuda", eager=True),
        Module(package, seed=4, device="cpu"),
    ]  # fmt: skip
    try:
        for step in range(STEPS):
            losses = [float(net.step(*batch(step), lr=0.01)) for net in nets]
            assert losses[0] == pytest.approx(losses[2], rel=10 * TOLERANCES["fp32"])
        captured, eager, cpu = nets
        print(captured.memory)
        assert captured.memory.peer_taken == captured.memory.peer_planned > 0
        for name in cpu.states:
            assert distance(captured.state(name), cpu.state(name)) <= 10 * TOLERANCES["fp32"], name
            assert distance(captured.state(name), eager.state(name)) <= 10 * TOLERANCES["fp32"], name
    finally:
        for net in nets:
            net.close()


def test_lent_memory_is_given_back(package: Path) -> None:
    driver = pytest.importorskip("pycuda.driver")
    lender = driver.Device(1).pci_bus_id()
    used: list[int | None] = []
    for _ in range(3):  # access that was enabled once stays enabled
        net = Module(package, device="cuda")
        net.step(*batch(), lr=0.01)
        net.close()
        used.append(used_bytes(lender))
    assert used[0] is not None and used[0] == used[1] == used[2]


def test_copies_between_gpus_are_measured(bench: Bench) -> None:
    bench.warm(Precision.FP32)
    try:
        link = bench.peer_link(Precision.FP32)
    except MbcError as error:
        if error.code != "MBC106":  # another program has the memory
            raise
        pytest.skip(error.message)
    print(link)
    assert link.measured and bench.gpu.mark() == 0
    for alone_gb_s, both_gb_s in (
        (link.to_peer_gb_s, link.to_peer_both_gb_s),
        (link.from_peer_gb_s, link.from_peer_both_gb_s),
    ):
        assert 1 < both_gb_s <= alone_gb_s < 2000
    assert 0 < link.latency_us < 200
    assert 1 <= link.beside_host < 4 and 1 <= link.host_beside < 4
