"""A step in two halves: what is complete at the cut, and the gradients that the second half leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mbc.cli import main
from mbc.compiler import compile_plan
from mbc.errors import BudgetError, MbcError
from mbc.hardware.streams import Space
from mbc.ir.graph import Role
from mbc.options import Options
from mbc.plan.cut import cut, is_cut
from mbc.plan.model import Plan
from mbc.plan.verify import verify_plan
from mbc.runtime.bindings import persistent_buffers
from mbc.runtime.halves import Halves
from mbc.runtime.module import Module
from mbc.source import Source
from tests.runtime.fake_pycuda import Gpu, device_bytes
from tests.runtime.nets import package

NET = """network net(batch = 8) {
  input image[batch, 3, 12, 12] : float
  input %s
  x = image |> conv(16, 3, pad=1) |> bn |> relu |> maxpool(2) |> conv(16, 3, pad=1) |> bn |> relu |> dropout(0.2)
  logits = x |> global_avgpool |> linear(5)
  output logits
  loss (logits, %s) |> %s
}
train { optimizer = %s }
"""
OUTSIDE = NET % ("g[batch, 5] : float", "g", "inner_product", "none")
OF_CLASSES = ("target[batch] : class", "target", "softmax_cross_entropy")
LABELS = np.arange(8) % 5
random = np.random.default_rng(5)
IMAGES = random.standard_normal((8, 3, 12, 12))


def planned(source: str = OUTSIDE, without: frozenset[str] = frozenset(), **settings: str) -> Plan:
    given = tuple((name.replace("_", "."), value) for name, value in settings.items())
    return compile_plan(Source("net.mbc", source), Options(settings=given, without=without))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_a_cut_plan_is_verified_and_divided(precision: str):
    plan = planned(train_precision=precision)
    verify_plan(plan)
    halves = cut(plan)
    assert halves is not None and halves.forward.launches and halves.backward.launches
    assert (*halves.forward.launches, *halves.backward.launches) == plan.train.launches


def test_halves_give_the_gradients_of_a_whole_step():
    whole = Module(planned(NET % (*OF_CLASSES, "sgd"), train_precision="fp64"), 3, "cpu")
    halves = Halves(planned(train_precision="fp64"), 3, "cpu")
    halves.load_state_dict(whole.state_dict())
    before = whole.state_dict()
    whole.step(IMAGES, LABELS, lr=1.0)
    halves.begin(IMAGES)
    (logits,) = (halves.copied(place) for place in halves.outputs)
    p = np.exp(logits - logits.max(1, keepdims=True))
    g = (p / p.sum(1, keepdims=True) - np.eye(5)[LABELS]) / 8
    halves.finish([g])
    after = whole.state_dict()
    for name, place in halves.gradients.items():
        np.testing.assert_allclose(halves.copied(place), before[name] - after[name], rtol=1e-9, atol=1e-12)
    for name, place in halves.places.items():
        if halves.plan.graph.values[name].role is Role.STATISTIC:
            np.testing.assert_allclose(halves.copied(place), after[name], rtol=1e-12)


@pytest.mark.parametrize("rule", ["sgd(momentum=0.9)", "adamw  clip_norm = 0.1  ema = 0.5", "adamw  accumulate = 2"])
def test_halves_with_an_optimizer_are_a_whole_step(rule: str):
    whole = Module(planned(NET % (*OF_CLASSES, rule), train_precision="fp64"), 3, "cpu")
    halves = Halves(planned(OUTSIDE.replace("none", rule), train_precision="fp64"), 3, "cpu")
    given = np.zeros((whole.step_batch, 5))
    for _ in range(2):
        images = random.standard_normal((whole.step_batch, 3, 12, 12))
        labels = np.resize(LABELS, whole.step_batch)
        whole.step(images, labels, lr=0.1)
        for start in range(0, whole.step_batch, 8):
            part = slice(start, start + 8)
            halves.begin(images[part])
            (logits,) = (halves.copied(place) for place in halves.outputs)
            p = np.exp(logits - logits.max(1, keepdims=True))
            given[part] = (p / p.sum(1, keepdims=True) - np.eye(5)[labels[part]]) / 8
            halves.finish([given[part]], start > 0, rate=0.1 if part.stop == whole.step_batch else None)
    assert not halves.gradients
    for name, array in whole.state_dict(optimizer=True).items():
        np.testing.assert_allclose(halves.state(name), array, rtol=1e-7, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_halves_of_several_mini_batches_on_a_gpu(gpu: Gpu, tmp_path: Path, share: float):
    plan = offloading(share, OUTSIDE.replace("none", "adamw  accumulate = 3"))
    verify_plan(plan)
    cpu, cuda = Halves(plan, 3, "cpu"), Halves(package(tmp_path, plan), 3, "cuda")
    once = Module(plan, 3, "cpu")  # the same mini-batches in one call
    images = random.standard_normal((3, 8, 3, 12, 12)).astype(np.float32)
    given = random.standard_normal((3, 8, 5)).astype(np.float32)
    for _ in range(2):
        for number in range(3):
            for halves in (cpu, cuda):
                halves.begin(images[number])
                halves.finish([given[number]], number > 0, rate=0.1 if number == 2 else None)
        once.step(images.reshape(-1, 3, 12, 12), given.reshape(-1, 5), lr=0.1)
    for name in cpu.states:
        np.testing.assert_array_equal(cuda.state(name), cpu.state(name), name)
        np.testing.assert_array_equal(once.state(name), cpu.state(name), name)


def test_the_second_half_adds_or_overwrites():
    halves = Halves(planned(NET.replace("|> dropout(0.2)", "") % ("g[batch, 5] : float", "g", "inner_product", "none"),
                            train_precision="fp64"), 3, "cpu")  # fmt: skip
    g = random.standard_normal((8, 5))
    sums: list[np.ndarray] = []
    for add in (False, True, False):
        halves.begin(IMAGES)
        halves.finish([g], add)
        sums.append(halves.copied(next(iter(halves.gradients.values()))))
    np.testing.assert_allclose(sums[1], 2 * sums[0], rtol=1e-12)
    np.testing.assert_array_equal(sums[2], sums[0])
    assert halves.given == ("g",)


def offloading(share: float, source: str = OUTSIDE) -> Plan:
    """Return a plan within a share of the arena that it would take without a limit; only offloading saves memory."""
    without = frozenset(("recompute", "micro_batches"))
    plan = planned(source, without)
    if share < 1:
        usual = plan.predictions
        limit = f"{int(share * usual.arena_bytes) + usual.overhead_bytes}B"
        plan = planned(source, without, memory_device=limit)
    assert (plan.predictions.host_bytes > 0) == (share < 1)
    return plan


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_the_second_half_reads_only_states_and_what_the_first_half_kept(gpu: Gpu, tmp_path: Path, share: float):
    """Run another mini-batch between the halves, and destroy all other bytes of the fake GPU and of host memory."""
    plan = offloading(share)
    alone, halves = Halves(plan, 3, "cpu"), Halves(package(tmp_path, plan), 3, "cuda")
    images, g = IMAGES.astype(np.float32), random.standard_normal((8, 5)).astype(np.float32)
    alone.begin(images)
    alone.finish([g])
    number = halves.begin(images)
    halves.wait()
    shared = [halves.shared(place) for place in halves.kept]
    places = [x if isinstance(x, np.ndarray) else device_bytes(x._address, *x.shape) for x in shared]
    copies = [place.copy() for place in places]
    halves.begin(-images)
    halves.wait()
    arena = device_bytes(halves._machine.arena_address or 0, plan.predictions.arena_bytes)
    host = halves._machine.memory_bytes(Space.HOST, 0, plan.predictions.host_bytes) if share < 1 else arena[:0]
    states = [slice(plan.offsets[i], plan.offsets[i] + plan.buffers[i].size_bytes)
              for i in persistent_buffers(plan, plan.train)]  # fmt: skip
    before, arena[:], host[:] = arena.copy(), 0xFF, 0xFF
    for part, numbers in (*((arena[s], before[s]) for s in states), *zip(places, copies, strict=True)):
        part[...] = numbers
    halves.finish([g], number=number)
    for name, place in halves.gradients.items():
        np.testing.assert_array_equal(halves.copied(place), alone.copied(alone.gradients[name]), name)
    alone.begin(-images)  # statistics count both mini-batches, in their order
    assert all(np.array_equal(halves.state(name), alone.state(name)) for name in halves.states)


@pytest.mark.parametrize("rule", ["none", "adamw"])
def test_what_is_given_at_the_cut_is_not_moved_before_it(rule: str):
    source = OUTSIDE.replace("none", rule)
    usual = planned(source).predictions
    try:
        plan = planned(source, memory_device=f"{usual.arena_bytes // 2 + usual.overhead_bytes}B")
    except BudgetError as refused:
        assert refused.code == "MBC204"
    else:
        halves = cut(plan)
        assert halves is not None and len(halves.forward.launches) > 5


def test_shared_memory_is_the_plans_own():
    halves = Halves(planned(train_precision="fp64"), 3, "cpu")
    name, place = next(iter(halves.places.items()))
    halves.shared(place)[...] = 0.5
    assert np.all(halves.state(name) == 0.5)


def test_a_program_that_computes_no_loss_has_no_halves():
    """Tests of single kernels write such programs by hand."""
    plan = planned(NET % (*OF_CLASSES, "sgd"))
    forward = tuple(op for op in plan.graph.train if plan.graph.loss not in op.outputs)
    assert not is_cut(replace(plan.graph, train=forward))


def test_a_plan_with_an_optimizer_has_no_halves():
    with pytest.raises(MbcError, match="has the optimizer sgd") as raised:
        Halves(planned(NET % (*OF_CLASSES, "sgd")), 0, "cpu")
    assert raised.value.code == "MBC239"


@pytest.mark.parametrize("entry", ["clip_norm = 1.0", "ema = 0.9", "accumulate = 2"])
def test_settings_of_an_update_need_an_optimizer(entry: str):
    with pytest.raises(MbcError, match="needs an optimizer") as raised:
        planned(OUTSIDE.replace("optimizer = none", f"optimizer = none  {entry}"))
    assert raised.value.code == "MBC052"


def test_a_loss_of_the_sources_own_is_cut_where_it_reads_the_target():
    halves = Halves(planned(NET % (*OF_CLASSES, "none"), train_precision="fp64"), 3, "cpu")
    halves.begin(IMAGES)
    halves.finish([LABELS])
    assert halves.given == ("target",)


def test_a_statistic_that_changes_behind_the_cut_is_refused():
    plan = planned(train_precision="fp64")
    late = [i for i, x in enumerate(plan.train.launches) if any("update_running" in name for name in x.operations)]
    assert len(late) == 1
    launches = [x for i, x in enumerate(plan.train.launches) if i not in late] + [plan.train.launches[late[0]]]
    moved = replace(plan, train=replace(plan.train, launches=tuple(launches), waits=()))
    with pytest.raises(MbcError, match="is not complete before the step reads") as raised:
        cut(moved)
    assert raised.value.code == "MBC129"


@pytest.mark.parametrize("command", ["train", "tune", "bench"])
def test_commands_that_train_need_an_optimizer(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = tmp_path / "net.mbc"
    source.write_text(OUTSIDE)
    given = {"train": ["--data", str(tmp_path / "x.npz"), "--epochs", "1"], "tune": ["--data", str(tmp_path / "x.npz")]}
    np.savez(tmp_path / "x.npz", image=IMAGES.astype(np.float32), g=np.zeros((8, 5), np.float32))
    assert main([command, str(source), *given.get(command, [])]) != 0
    said = capsys.readouterr().err
    assert "MBC068" in said and "trains, but the network has optimizer = none" in said
