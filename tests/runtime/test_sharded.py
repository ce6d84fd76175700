"""Ranks with sharded optimizer states train like ranks with whole states, to the bit, and save whole states."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mbc.compiler import compile_plan, compile_plans
from mbc.errors import BudgetError, MbcError
from mbc.options import Options
from mbc.plan.collectives import sharing_of
from mbc.plan.model import Plan
from mbc.plan.verify_ranks import verify_ranks
from mbc.runtime.checkpoint import Checkpoint
from mbc.runtime.module import Module
from mbc.source import Source
from tests.gathering import small_gradients_are_gathered
from tests.runtime.test_ranks import Trained, distance, rows, steps, trained
from tests.train.threads import ThreadRank, run_ranks

BATCH = 12
# Two ranks share 64, 70 and 50 rows evenly, three ranks do not. The last two parameters are too small for parts.
SOURCE = """network net(batch = 12) {
  input image[batch, 3, 6, 6] : float
  input label[batch] : class
  x = image |> conv(64, 3, pad=1) |> relu |> conv(70, 3, pad=1, stride=2, bias=true) |> relu
  logits = x |> flatten |> linear(50) |> relu |> linear(4)
  output logits
  loss (logits, label) |> softmax_cross_entropy
}
train { %s }
"""
SGD = "optimizer = sgd(momentum=0.9, nesterov=true, weight_decay=1e-2)"
ADAMW = "optimizer = adamw(weight_decay=0.1)"


@cache
def plans_of(size: int, train: str, precision: str = "fp32", shard: str = "true") -> tuple[Plan, ...]:
    settings = (("train.precision", precision), ("train.shard_optimizer", shard))
    source = Source("net.mbc", SOURCE % train)
    if size == 1:
        return (compile_plan(source, Options(gpu="h200", settings=settings)),)
    return compile_plans(source, Options(gpu="h200", gpus=size, settings=settings))


def batches(count: int = 4, start: int = 0) -> list[tuple[np.ndarray, ...]]:
    return [rows(step, BATCH) for step in range(start, start + count)]


def assert_same(one: Trained, other: Trained, exact: bool = True) -> None:
    assert one.states.keys() == other.states.keys()
    for name, array in one.states.items():
        assert array.shape == other.states[name].shape
        if exact:
            np.testing.assert_array_equal(array, other.states[name], name)
    assert distance(one, other) <= (0 if exact else 1e-5)
    np.testing.assert_allclose(one.figures, other.figures, rtol=0 if exact else 1e-5)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("train", "precision"), [(SGD, "fp32"), (SGD, "fp64"), (ADAMW, "bf16"), (ADAMW, "fp16"), (SGD, "fp16")]
)
def test_they_train_as_with_whole_states(train: str, precision: str, size: int) -> None:
    plans = plans_of(size, train, precision)
    sharing = sharing_of(plans[0])
    assert sharing is not None and 0 < sharing.state_bytes <= sharing.whole_state_bytes * (1 / size + 0.02)
    whole = trained(size, plans_of(size, train, precision, "false"), batches())
    for one, other in zip(trained(size, plans, batches()), whole, strict=True):
        assert_same(one, other)
    assert whole[0].control["updates"] == 4


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_norm_is_clipped_over_all_parts(precision: str, size: int) -> None:
    """The norm is rounded once more, which changes the last digits only."""
    train = f"{SGD}  clip_norm = 0.05  clip_value = 0.01"
    whole = trained(size, plans_of(size, train, precision, "false"), batches())
    sharded = trained(size, plans_of(size, train, precision), batches())
    assert_same(whole[0], sharded[0], exact=False)
    for one in sharded[1:]:
        assert_same(one, sharded[0])
    assert distance(trained(size, plans_of(size, SGD, precision), batches())[0], sharded[0]) > 1e-3  # it is clipped


def test_scaled_parameters_have_scaled_gradients() -> None:
    """Such a scale looks like the copy of an accumulated sum, but is not one."""
    source = """network net(batch = 12) {
  input image[batch, 3, 6, 6] : float
  input label[batch] : class
  x = image |> flatten |> linear(64)
  logits = (x * (parameter((64,)) @gain * -0.25)) |> linear(64) |> relu |> linear(4)
  wide = (image |> flatten |> linear(4096)) * (parameter((4096,)) @wide * -0.25)
  logits = logits + (wide |> linear(4))
  output logits
  loss (logits, label) |> softmax_cross_entropy
}
train { %s }
"""

    def plans(shard: str) -> tuple[Plan, ...]:
        settings = (("train.shard_optimizer", shard),)
        return compile_plans(Source("net.mbc", source % ADAMW), Options(gpu="h200", gpus=2, settings=settings))

    sharded = plans("true")
    assert any(op.inputs[0] == "wide" for op in sharded[0].graph.train if op.kind == "adamw_update_part")
    whole = trained(2, plans("false"), batches())
    for one, other in zip(trained(2, sharded, batches()), whole, strict=True):
        assert_same(one, other)


def test_groups_and_frozen_parameters_stay_so() -> None:
    groups = 'groups = group("conv0.*", rate=0.5, weight_decay=0.2)  no_decay = norm_and_bias  frozen = "linear0.*"'
    train = f"{ADAMW}  {groups}"
    whole = trained(2, plans_of(2, train, shard="false"), batches())
    sharded = trained(2, plans_of(2, train), batches())
    assert_same(sharded[1], whole[1])
    assert "conv0.weight.m" in whole[1].states and "linear0.weight.m" not in whole[1].states


@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
def test_moving_averages_are_of_the_gathered_parameters(optimizer: str) -> None:
    train = f"{optimizer}  ema = 0.5"
    whole = trained(2, plans_of(2, train, shard="false"), batches())
    sharded = trained(2, plans_of(2, train), batches())
    assert_same(sharded[1], whole[1])
    assert "conv0.weight.ema" in whole[1].states


def test_averages_are_saved_by_rank_0_alone(tmp_path: Path) -> None:
    plans = plans_of(2, f"{ADAMW}  ema = 0.5")

    def body(member: ThreadRank) -> None:
        with Module(plans[0], seed=3, device="cpu", ranks=member) as net:
            steps(net, member.rank, batches(1))
            net.save(tmp_path / "averages", ema=True)
            net.save(tmp_path / "whole")

    run_ranks(2, body)
    averages, whole = (load_file(tmp_path / name) for name in ("averages", "whole"))
    assert not any(name.endswith(".m") for name in averages) and any(name.endswith(".m") for name in whole)


@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
def test_gradients_of_several_mini_batches_are_summed_once(optimizer: str) -> None:
    train = f"{optimizer}  ema = 0.5  accumulate = 2"
    both = [tuple(map(np.concatenate, zip(*pair, strict=True))) for pair in zip(batches(4), batches(4, 4), strict=True)]
    whole = trained(2, plans_of(2, train, shard="false"), both)
    sharded = trained(2, plans_of(2, train), both)
    assert_same(sharded[1], whole[1])
    assert whole[1].control["updates"] == 4


@pytest.mark.parametrize("kind", ["lars", "lamb"])
def test_steps_by_norms_of_whole_parameters_keep_their_states_whole(kind: str) -> None:
    train = f"optimizer = {kind}(weight_decay=0.1)"
    (plan,) = plans_of(2, train, shard="auto")
    sharing = sharing_of(plan)
    assert sharing is not None and not sharing.shards
    with pytest.raises(MbcError, match=f"MBC101: states of {kind} cannot be sharded"):
        plans_of(2, train)


def test_a_mini_batch_that_is_not_finite_changes_nothing_on_any_rank() -> None:
    spoilt = [
        (np.where(np.arange(BATCH)[:, None, None, None] == 0, np.nan, image), label) for image, label in batches(1)
    ]
    after = trained(2, plans_of(2, ADAMW, "fp16"), [*batches(2), *spoilt])
    for one in after:
        assert one.control["skipped"] == 1 and all(np.isfinite(array).all() for array in one.states.values())
    before = trained(2, plans_of(2, ADAMW, "fp16"), batches(2))[0]
    np.testing.assert_array_equal(before.states["linear0.weight"], after[0].states["linear0.weight"])


def test_gradients_of_gathered_rows_are_read_at_this_ranks_part() -> None:
    source = Source("net.mbc", (SOURCE % ADAMW).replace("linear(50)", "linear(130)"))

    def plans(shard: str) -> tuple[Plan, ...]:
        with small_gradients_are_gathered():
            return compile_plans(source, Options(gpu="h200", gpus=2, settings=(("train.shard_optimizer", shard),)))

    sharded = plans("true")
    kinds = [op.kind for op in sharded[0].graph.train]
    assert "gather_rows" in kinds and kinds.count("adamw_update_part") > kinds.count("reduce_scatter") > 0
    for one, other in zip(trained(2, sharded, batches()), trained(2, plans("false"), batches()), strict=True):
        assert_same(one, other)


def continued(
    size: int, train: str, path: Path | None, save: Path | None, start: int, precision: str = "fp64"
) -> Trained:
    """Return rank 0's result of two steps, before which a checkpoint may be loaded and after which one may be saved."""
    plans = plans_of(size, train, precision, "true")

    def body(member: ThreadRank) -> Trained:
        with Module(plans[0], seed=3, device="cpu", ranks=member if size > 1 else None) as net:
            if path is not None:
                net.load(path)
            result = steps(net, member.rank, batches(2, start))
            if save is not None:
                net.save(save)
            return result

    return run_ranks(size, body)[0]


@pytest.mark.parametrize("train", [SGD, ADAMW])
def test_a_checkpoint_is_whole_and_goes_on_with_any_number_of_ranks(train: str, tmp_path: Path) -> None:
    saved, other = tmp_path / "two.safetensors", tmp_path / "one.safetensors"
    after = continued(2, train, None, saved, 0)
    alone = continued(1, train, None, other, 0)
    saved_tensors, wanted = Checkpoint(saved).tensors, Checkpoint(other).tensors
    assert {name: tensor.shape for name, tensor in saved_tensors.items()} == {n: t.shape for n, t in wanted.items()}
    assert distance(alone, after) < 1e-12
    all_steps = trained(2, plans_of(2, train, "fp64", "false"), batches(4))[0]
    for size in (1, 2, 3):
        resumed = continued(size, train, saved, None, 2)
        assert distance(all_steps, resumed) <= (0 if size == 2 else 1e-12)
    assert distance(all_steps, continued(2, train, other, None, 2)) < 1e-12


def test_states_are_whole_to_whoever_asks() -> None:
    (plan,) = plans_of(3, ADAMW)
    shape = (70, 64, 3, 3)

    def body(member: ThreadRank) -> dict[str, np.ndarray]:
        with Module(plan, device="cpu", ranks=member) as net:
            assert net.states["conv1.weight.m"] == net.states["conv1.weight"] == shape
            given = np.random.default_rng(5).normal(0, 1, shape).astype(np.float32)
            net.set_state("conv1.weight.m", given)
            np.testing.assert_array_equal(net.state("conv1.weight.m"), given)
            with pytest.raises(MbcError, match=r"MBC165.*has the shape") as refused:
                net.set_state("conv1.weight.m", given[:24])
            assert "[70, 64, 3, 3], got float32 [24, 64, 3, 3]" in refused.value.message
            state_arrays = net.state_dict(optimizer=True)
            net.load_state_dict({name: array + 1 for name, array in state_arrays.items()})
            return net.state_dict(optimizer=True)

    first, *others = run_ranks(3, body)
    assert first["conv1.weight.v"].min() == 1
    for other in others:
        for name, array in first.items():
            np.testing.assert_array_equal(array, other[name])


def test_one_gpu_has_all_states() -> None:
    assert plans_of(1, ADAMW)[0].graph == plans_of(1, ADAMW, shard="false")[0].graph


def test_the_planner_shards_only_for_want_of_memory() -> None:
    # Most bytes are states, which cannot be recomputed or, here, offloaded: whole states are refused at once.
    wide = "linear(700) |> linear(700) |> linear(700)"
    source = Source("net.mbc", (SOURCE % ADAMW).replace("linear(50)", wide))

    def planned(*settings: tuple[str, str]) -> Plan:
        (plan,) = compile_plans(source, Options(gpu="h200", gpus=4, settings=settings))
        return plan

    whole = planned()
    assert whole.graph == planned(("train.shard_optimizer", "false")).graph
    wanted = planned(("train.shard_optimizer", "true")).predictions
    budget_bytes = wanted.arena_bytes + wanted.overhead_bytes
    tight = (("memory.device", f"{budget_bytes} B"), ("memory.host", "0 B"))
    plan = planned(*tight)
    sharding = sharing_of(plan)
    assert sharding is not None and sharding.state_bytes > 0
    assert plan.predictions.arena_bytes < 0.8 * whole.predictions.arena_bytes
    verify_ranks([plan])
    with pytest.raises(BudgetError):
        planned(*tight, ("train.shard_optimizer", "false"))


def test_ranks_of_several_plans_cannot_shard() -> None:
    settings = (("train.shard_optimizer", "true"), ("batch", "13"))
    source = Source("net.mbc", SOURCE % ADAMW)
    with pytest.raises(MbcError, match=r"MBC100.*states cannot be sharded over 2 GPUs that do not run one plan"):
        compile_plans(source, Options(gpu="h200", gpus=2, settings=settings))
    auto = compile_plans(source, Options(gpu="h200", gpus=2, settings=settings[1:]))
    assert len(auto) == 2
