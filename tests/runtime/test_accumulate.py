"""Steps that accumulate the gradients of several mini-batches: PyTorch's results, a simulated GPU, and budgets."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.fit import figures
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.hardware.streams import Stream
from mbc.optimize.schedule.step_time import step_us
from mbc.options import Options, Policy
from mbc.plan.accumulation import accumulating, waits_of_part
from mbc.plan.model import Copy, Launch, Plan, Program
from mbc.plan.verify import verify_plan
from mbc.runtime.launch_order import Transfers
from mbc.runtime.module import Module
from mbc.source import Source
from tests.runtime.fake_pycuda import Gpu
from tests.runtime.nets import SMALL, batch, package

COUNT, ROWS = 3, 6
RULE = "optimizer = sgd(momentum=0.9, weight_decay=1e-3)"
ENTRIES = f"""optimizer = adamw(weight_decay=0.1)  no_decay = norm_and_bias  clip_norm = 0.5  ema = 0.9
  groups = group("head.*", rate=3)  accumulate = {COUNT}"""


@cache
def plan_of(entries: str = ENTRIES, precision: str = "fp32", dropout: bool = False) -> Plan:
    text = (SMALL if dropout else SMALL.replace(" |> dropout(0.2)", "")).replace(RULE, entries)
    return compile_plan(Source("small.mbc", text), Options(gpu="h200", settings=(("train.precision", precision),)))


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_fifty_updates_are_those_of_pytorch(precision: str):
    torch = pytest.importorskip("torch", reason="the independent reference is PyTorch, which is not installed")
    from mbc.bench.torch_network import TorchNetwork

    plan = plan_of(ENTRIES, precision)
    rule = plan.graph.optimizer
    net = Module(plan, seed=3, device="cpu", shadow=False)
    network = lower(parse(Source("small.mbc", SMALL.replace(" |> dropout(0.2)", "")))).network
    dtype = torch.float64 if precision == "fp64" else torch.float32
    theirs = TorchNetwork(network, net.state_dict(), dtype, "cpu", False)
    optimizer = theirs.optimizer(rule, 0.01)
    swa = torch.optim.swa_utils
    average = swa.AveragedModel(theirs, multi_avg_fn=swa.get_ema_multi_avg_fn(rule.ema), use_buffers=True)
    limit = 1e-7 if precision == "fp64" else 2e-4  # the factor of a clipped norm is fp32
    for i in range(50):
        image, target = batch(i, COUNT * ROWS)
        loss = net.step(image, target, lr=0.01)
        optimizer.zero_grad()
        losses = []
        for rows in np.split(np.arange(COUNT * ROWS), COUNT):
            loss_of_step = theirs(theirs.place((image[rows], target[rows])))[0]
            (loss_of_step / COUNT).backward()
            losses.append(float(loss_of_step.detach()))
        theirs.clip(rule)
        optimizer.step()
        average.update_parameters(theirs)
        assert float(loss) == pytest.approx(np.mean(losses), rel=10 * limit)
    assert net.control["updates"] == 50 and net.control["step"] == 50 * COUNT
    for ours, wanted in ((net.state_dict(), theirs), (net.state_dict(ema=True), average.module)):
        for name, array in wanted.states().items():
            np.testing.assert_allclose(ours[name], array, rtol=limit, atol=limit, err_msg=name)


def test_equal_mini_batches_are_one_of_them():
    """Several equal mini-batches give the result of one, except for running statistics, which change with each."""
    rule = "optimizer = sgd(momentum=0.9) clip_value = 0.1"
    several, one = (Module(plan_of(f"{rule} {more}", "fp64"), seed=2, device="cpu") for more in ("accumulate = 4", ""))
    image, target = batch()
    for _ in range(3):
        loss_of_step = several.step(np.tile(image, (4, 1, 1, 1)), np.tile(target, 4), lr=0.1)
        wanted = one.step(image, target, lr=0.1)
        assert float(loss_of_step) == pytest.approx(float(wanted), rel=1e-12)
        assert loss_of_step.accuracy == wanted.accuracy and several.correct == 4 * (one.correct or 0)
    for name in one.states:
        if "running" not in name:
            np.testing.assert_allclose(several.state(name), one.state(name), rtol=1e-12, atol=1e-14, err_msg=name)
    assert not np.allclose(several.state("bn0.running_mean"), one.state("bn0.running_mean"))


def test_dropout_draws_anew_for_each_mini_batch():
    net = Module(plan_of(f"{RULE} accumulate = 2", dropout=True), device="cpu")
    same = Module(plan_of(f"{RULE}", dropout=True), device="cpu")
    image, target = batch()
    losses = [float(same.step(image, target, lr=0.0)) for _ in range(2)]
    assert losses[0] != losses[1]
    loss_of_step = float(net.step(np.tile(image, (2, 1, 1, 1)), np.tile(target, 2), lr=0.0))
    assert loss_of_step == pytest.approx(np.mean(losses), rel=1e-5)


def test_one_mini_batch_that_is_not_finite_skips_the_step():
    net = Module(plan_of(), seed=1, device="cpu")
    image, target = batch(0, COUNT * ROWS)
    before = net.state_dict(optimizer=True)
    image[ROWS] = np.nan  # of the second mini-batch
    assert not np.isfinite(float(net.step(image, target, lr=0.1)))
    assert (net.control["updates"], net.control["skipped"]) == (0, 1)
    for name, array in net.state_dict(optimizer=True).items():
        moved = name in ("bn0.running_mean", "bn0.running_var")
        assert np.isfinite(net.state(name)).all() and np.array_equal(array, before[name]) is not moved, name
    image[ROWS] = 0
    assert np.isfinite(float(net.step(image, target, lr=0.1))) and net.control["updates"] == 1


def test_a_step_takes_the_rows_of_all_its_mini_batches(tmp_path: Path):
    net = Module(plan_of(), device="cpu")
    assert (net.batch, net.step_batch) == (ROWS, COUNT * ROWS)
    with pytest.raises(MbcError, match="has 6 rows, a step takes exactly 18") as caught:
        net.step(*batch(), lr=0.1)
    assert caught.value.code == "MBC147" and "(accumulate: 3 mini-batches of 6)" in caught.value.message
    assert "--set batch=2" in caught.value.remedy
    assert np.shape(net.forward(batch()[0])) == (ROWS, 5)
    net.step(*batch(0, COUNT * ROWS), lr=0.1)
    net.save(tmp_path / "w")
    other = Module(plan_of(), seed=9, device="cpu")
    other.load(tmp_path / "w")
    for module in (net, other):
        module.step(*batch(1, COUNT * ROWS), lr=0.1)
    assert not any(name.startswith(("before.", "accumulated.")) for name in net.states)
    assert all(np.array_equal(net.state(name), other.state(name)) for name in net.states)


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_gpu_computes_the_cpus_results(gpu: Gpu, tmp_path: Path, prefetch: bool):
    plan = plan_of()
    ours = Module(package(tmp_path, plan), seed=4, device="cuda", prefetch=prefetch)
    cpu = Module(plan, seed=4, device="cpu")
    losses = [
        (ours.step(*data, lr=0.1), cpu.step(*data, lr=0.1)) for data in (batch(i, COUNT * ROWS) for i in range(5))
    ]
    assert [float(a) for a, _ in losses] == [float(b) for _, b in losses]
    assert all(np.array_equal(ours.state(name), cpu.state(name)) for name in cpu.states)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
def test_plans_in_other_precisions_are_verified(precision: str):
    verify_plan(plan_of(ENTRIES, precision))


@cache
def within(share: float) -> Plan:
    """Return the plan of a network with large parameters, so that a budget offloads the optimizer's states."""
    text = SMALL.replace(" |> dropout(0.2)", "").replace("conv(4", "conv(64").replace(RULE, ENTRIES)
    options = Options(gpu="h200", policy=Policy.UNDIVIDED)  # sums of divided rows have other bits
    free = compile_plan(Source("small.mbc", text), options)
    if share == 1:
        return free
    p = free.predictions
    device = f"{p.overhead_bytes + int(share * p.arena_bytes)} B"
    return compile_plan(Source("small.mbc", text), replace(options, settings=(("memory.device", device),)))


@pytest.mark.parametrize("transfers", [*Transfers])
def test_budgets_change_no_bit(transfers: Transfers):
    tight = within(0.24)  # with more mini-batches, values are copied in each of them
    verify_plan(tight)
    copies = [launch for launch in tight.train.launches if isinstance(launch.work, Copy)]
    part = accumulating(tight)
    assert part is not None and copies
    assert sum(isinstance(launch.work, Copy) for launch in part.launches) < len(copies)
    nets = [Module(plan, seed=5, device="cpu", transfers=transfers) for plan in (tight, within(1))]
    for i in range(3):
        for net in nets:
            net.step(*batch(i, COUNT * ROWS), lr=0.05)
    one, other = ({name: net.state(name).tobytes() for name in net.states} for net in nets)
    assert one == other


def test_the_part_of_a_plan_that_is_not_its_launches_is_refused():
    plan = plan_of()
    part = accumulating(plan)
    assert part is not None and 0 < len(part.launches) < len(plan.train.launches)
    assert accumulating(plan_of(RULE)) is None
    late = [x for x in plan.train.launches if x not in part.launches]
    first = next(x for x in plan.train.launches if x.operations)
    mixed = replace(late[0], operations=(*first.operations, *late[0].operations))
    launches = tuple(mixed if x is late[0] else x for x in plan.train.launches)
    with pytest.raises(MbcError, match="some of its operations run for each mini-batch, others for the last") as caught:
        accumulating(replace(plan, train=replace(plan.train, launches=launches)))
    assert caught.value.code == "MBC123"


def test_waits_pass_through_launches_that_are_left_out():
    """If c waits for b, which is left out and waited for a, then c waits for a."""
    empty = Launch(Copy(1.0, False), (), Stream.COMPUTE, ())
    streams = (Stream.COMPUTE, Stream.TO_HOST, Stream.TO_DEVICE, Stream.TO_HOST)
    program = Program(tuple(replace(empty, stream=s) for s in streams), ((0, 1), (1, 2)), (), ())
    assert waits_of_part(program, (True, False, True, True)) == [(0, 2), (0, 3)]
    assert waits_of_part(program, (True, True, True, True)) == [(0, 1), (1, 2)]
    assert waits_of_part(program, (False, True, True, False)) == [(1, 2)]


def test_images_a_second_count_all_mini_batches():
    plan = plan_of(f"{RULE} accumulate = 4")
    shown_figures = figures(plan)
    assert shown_figures.images_per_s == pytest.approx(4 * plan.graph.batch * 1e6 / step_us(plan))
    assert plan.predictions.train_us < step_us(plan) < 4 * plan.predictions.train_us, "only the last one updates"
