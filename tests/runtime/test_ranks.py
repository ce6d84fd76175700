"""Several ranks on the CPU train like one rank on the whole mini-batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mbc.codegen.build import write_package
from mbc.codegen.toolchain import Places, find_toolchain
from mbc.compiler import compile_plan, compile_plans
from mbc.errors import MbcError
from mbc.ir.graph import Ranks
from mbc.options import Options, RankGpu
from mbc.plan.file import rank_folder
from mbc.plan.model import Plan
from mbc.runtime.membership import check_membership, check_size, seed_of
from mbc.runtime.module import Module
from mbc.runtime.opening import open_plan
from mbc.source import Source
from mbc.train.share import step_share_of
from tests.gathering import small_gradients_are_gathered
from tests.train.threads import ThreadRank, run_ranks

BATCH, CLASSES = 10, 4  # of three ranks the first has four rows, the others three
SOURCE = """network net(batch = 10) {
  input image[batch, 3, 6, 6] : float
  input label[batch] : class
  x = image |> conv(6, 3, pad=1) |> relu |> conv(4, 3, pad=1, stride=2, bias=true) |> relu
  logits = x |> flatten%s |> linear(4)
  output logits
  loss (logits, label) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9, weight_decay=1e-4) }
"""


@cache
def plans_of(size: int, precision: str = "fp64", dropout: str = "", batch: int = BATCH) -> tuple[Plan, ...]:
    source = Source("net.mbc", SOURCE % (f" |> dropout({dropout})" if dropout else ""))
    settings = (("train.precision", precision), ("batch", str(batch)))
    if size == 1:
        return (compile_plan(source, Options(gpu="h200", settings=settings)),)
    return compile_plans(source, Options(gpu="h200", gpus=size, settings=settings))


def plan_of(rank: int, plans: tuple[Plan, ...]) -> Plan:
    (rank_plan,) = (plan for plan in plans if plan.graph.ranks is None or rank in plan.graph.ranks.members)
    return rank_plan


def rows(step: int, count: int = BATCH) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(step)
    labels = draws.integers(0, CLASSES, count)
    return draws.normal(0, 1, (count, 3, 6, 6)) + labels[:, None, None, None] / 2, labels


class Trained:
    """The states and losses of one rank after some steps."""

    def __init__(self, net: Module, figures: list[tuple[float, ...]]) -> None:
        self.figures, self.control = figures, net.control
        self.states = {name: net.state(name) for name in net.states}


def own(plan: Plan, rank: int, arrays: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    share = step_share_of(plan.graph, rank)
    return tuple(array[share.first : share.stop] for array in arrays)


def steps(net: Module, rank: int, batches: list[tuple[np.ndarray, ...]]) -> Trained:
    figures: list[tuple[float, ...]] = []
    for arrays in batches:
        image, label = own(net.plan, rank, arrays)
        dtype = np.float64 if net.plan.graph.precision.value == "fp64" else np.float32
        loss = float(net.step(image.astype(dtype), label, lr=0.05))
        figures.append((loss, *(float(value) for value in net.metrics.values())))
    return Trained(net, figures)


def trained(size: int, plans: tuple[Plan, ...], batches: list[tuple[np.ndarray, ...]], seed: int = 3) -> list[Trained]:
    def body(member: ThreadRank) -> Trained:
        plan = plan_of(member.rank, plans)
        with Module(plan, seed=seed, device="cpu", ranks=member if size > 1 else None) as net:
            return steps(net, member.rank, batches)

    return list(run_ranks(size, body))


def distance(one: Trained, other: Trained) -> float:
    """Return the largest difference of a state, relative to its largest element."""
    assert one.states.keys() == other.states.keys()
    distances = [
        float(np.abs(one.states[name].astype(float) - other.states[name]).max() / np.abs(one.states[name]).max())
        for name in one.states
        if np.abs(one.states[name]).max() > 0
    ]
    return max(distances)


# A rank's gradients are sums of other terms: fp32 of 10 rows and 36 pixels, whose operands bf16 rounds to 8 bits.
@pytest.mark.parametrize(("precision", "bound"), [("fp64", 1e-12), ("fp32", 2e-5), ("bf16", 2e-2)])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_train_as_one(size: int, precision: str, bound: float):
    batches = [rows(step) for step in range(5)]
    (alone,) = trained(1, plans_of(1, precision), batches)
    plans = plans_of(size, precision)
    assert [len(plan.graph.ranks.members) for plan in plans if plan.graph.ranks is not None] == (
        [2] if size == 2 else [1, 2]
    )
    together = trained(size, plans, batches)
    for one in together:
        assert one.figures == together[0].figures  # those of the whole mini-batch, everywhere
        for name, array in one.states.items():
            np.testing.assert_array_equal(array, together[0].states[name])
    assert distance(alone, together[0]) <= bound
    np.testing.assert_allclose(together[0].figures, alone.figures, rtol=10 * bound)
    unmoved = trained(1, plans_of(1, precision), [])[0]
    assert distance(unmoved, alone) > 10 * bound  # they have gone somewhere


# A bias in front of batch normalisation has no gradient but rounding errors.
NORMALISED = SOURCE.replace("|> relu", "|> bn(sync=true) |> relu").replace(", bias=true", "")


@cache
def plans_of_source(text: str, size: int, precision: str) -> tuple[Plan, ...]:
    settings = (("train.precision", precision),)
    if size == 1:
        return (compile_plan(Source("net.mbc", text % ""), Options(gpu="h200", settings=settings)),)
    return compile_plans(Source("net.mbc", text % ""), Options(gpu="h200", gpus=size, settings=settings))


def synchronised(size: int, precision: str) -> tuple[Plan, ...]:
    return plans_of_source(NORMALISED, size, precision)


# Sums of fewer terms in another order, as above; a normalised bf16 operand is rounded once more.
@pytest.mark.parametrize(("precision", "bound"), [("fp64", 1e-12), ("fp32", 5e-5), ("bf16", 4e-2)])
@pytest.mark.parametrize("size", [2, 3])
def test_synchronised_batch_norm_has_the_statistics_of_the_whole_mini_batch(size: int, precision: str, bound: float):
    batches = [rows(step) for step in range(5)]
    (alone,) = trained(1, synchronised(1, precision), batches)
    together = trained(size, synchronised(size, precision), batches)
    for one in together:
        assert one.figures == together[0].figures
        # The running statistics, too, which differ by rank where each has its own.
        for name, array in one.states.items():
            np.testing.assert_array_equal(array, together[0].states[name])
    assert any(name.endswith("running_mean") for name in alone.states)
    assert distance(alone, together[0]) <= bound
    np.testing.assert_allclose(together[0].figures, alone.figures, rtol=10 * bound)
    apart = trained(size, plans_of_source(NORMALISED.replace("(sync=true)", ""), size, precision), batches)
    assert distance(alone, apart[0]) > 10 * bound


# A layer wide enough that operands of its gradient are gathered, in the place of summing it.
WIDE = SOURCE.replace("|> linear(4)", "|> linear(64) |> relu |> linear(64) |> relu |> linear(4)")


@pytest.mark.parametrize(("precision", "bound"), [("fp64", 1e-12), ("fp32", 5e-5), ("bf16", 4e-2)])
@pytest.mark.parametrize(("size", "batch"), [(2, 4), (3, 3)])
def test_gradients_of_gathered_rows_are_sums_over_ranks(size: int, batch: int, precision: str, bound: float):
    text = WIDE.replace("batch = 10", f"batch = {batch}")
    batches = [rows(step, batch) for step in range(5)]
    (alone,) = trained(1, plans_of_source(text, 1, precision), batches)
    with small_gradients_are_gathered():
        plans = plans_of_source(text, size, precision)
    kinds = Counter(op.kind for op in plans[0].graph.train)
    assert kinds["gather_rows"] >= 2 and len(plans) == 1
    together = trained(size, plans, batches)
    for one in together:
        assert one.figures == together[0].figures
        for name, array in one.states.items():
            np.testing.assert_array_equal(array, together[0].states[name])
    assert distance(alone, together[0]) <= bound
    assert distance(trained(1, plans_of_source(text, 1, precision), [])[0], alone) > 5 * bound


def overflowing(plans: tuple[Plan, ...], count: int) -> tuple[Trained, Trained]:
    image, label = rows(0, count)
    image[-1] = np.inf  # on rank 1
    first, second = trained(2, plans, [rows(1, count), (image, label), rows(2, count)])
    return first, second


def test_no_rank_updates_from_gathered_rows_that_overflow():
    with small_gradients_are_gathered():
        plans = plans_of_source(WIDE.replace("batch = 10", "batch = 4"), 2, "fp16")
    assert any(op.kind == "gather_rows" for op in plans[0].graph.train)
    for one in overflowing(plans, 4):
        assert [one.control[name] for name in ("step", "updates", "skipped")] == [3, 2, 1]


WEIGHTED = SOURCE.replace(
    "|> softmax_cross_entropy",
    "|> softmax_cross_entropy(smoothing=0.1, ignore_index=3, class_weights=(1, 0.5, 2, 1))\n"
    "  loss 0.1 * ((logits, 0 * logits) |> smooth_l1)",
)


JOINED = SOURCE.replace("|> softmax_cross_entropy", "|> dice(batch=true, ignore_index=3, cross_entropy=0.5)")


@pytest.mark.parametrize("source", [WEIGHTED, JOINED])
@pytest.mark.parametrize(("precision", "bound"), [("fp64", 1e-12), ("bf16", 2e-2)])
def test_a_mean_that_classes_weight_is_over_the_weights_of_all_ranks(source: str, precision: str, bound: float):
    """In one step all positions of one rank are ignored, and none of another rank's."""
    batches = [rows(step) for step in range(3)]
    batches[1][1][:] = [3, 3, 3, 3, 0, 1, 2, 0, 1, 2]
    (alone,) = trained(1, plans_of_source(source, 1, precision), batches)
    together = trained(3, plans_of_source(source, 3, precision), batches)
    assert all(one.figures == together[0].figures for one in together)
    assert distance(alone, together[0]) <= bound
    np.testing.assert_allclose(together[0].figures, alone.figures, rtol=10 * bound)


def test_no_rank_updates_where_one_overflows():
    """In fp16 the guard looks at the sums. After an overflow on one rank both ranks halve the loss scale.

    Nothing else changes.
    """
    image, label = rows(0)
    image[7] = np.inf  # on rank 1
    batches = [rows(1), (image, label), rows(2)]
    first, second = trained(2, plans_of(2, "fp16"), batches)
    assert first.control == second.control and first.figures[0] == second.figures[0]
    assert [first.control[name] for name in ("step", "updates", "skipped")] == [3, 2, 1]
    assert np.isnan(first.figures[1][0]) and np.isnan(second.figures[1][0]) and first.figures[2] == second.figures[2]
    for name, array in first.states.items():
        np.testing.assert_array_equal(array, second.states[name])
    fewer, _ = trained(2, plans_of(2, "fp16"), batches[:1])
    skipped, _ = trained(2, plans_of(2, "fp16"), batches[:2])
    for name, array in fewer.states.items():
        np.testing.assert_array_equal(array, skipped.states[name])


def test_each_rank_drops_elements_of_its_own():
    """Both ranks have equal rows. With equal masks, they would compute the result of one rank."""
    half = rows(0, 4)
    whole = tuple(np.concatenate([array, array]) for array in half)
    for dropout, least, most in (("", 0.0, 1e-12), ("0.5", 1e-3, np.inf)):
        (alone,) = trained(1, plans_of(1, dropout=dropout, batch=4), [half])
        first, second = trained(2, plans_of(2, dropout=dropout, batch=8), [whole])
        assert least <= distance(alone, first) <= most
        assert distance(first, second) == 0.0
        assert first.control["seed"] == second.control["seed"] == 3  # the user's
    seeds = [seed_of(seed, rank) for seed in (0, 1, 3, (1 << 63) - 1) for rank in range(1024)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 1 << 63 for seed in seeds)
    assert [seed_of(seed, 0) for seed in (0, 3, (1 << 63) - 1)] == [0, 3, (1 << 63) - 1]


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 3), (3, 1), (1, 2)])
def test_a_checkpoint_is_of_no_number_of_ranks(tmp_path: Path, saved_by: int, loaded_by: int):
    file = tmp_path / "states"

    def save(member: ThreadRank) -> None:
        plan = plan_of(member.rank, plans_of(saved_by))
        with Module(plan, seed=3, device="cpu", ranks=member if saved_by > 1 else None) as net:
            steps(net, member.rank, [rows(0)])
            net.save(file if member.rank == 0 else tmp_path / f"of rank {member.rank}")

    def load(member: ThreadRank) -> Trained:
        plan = plan_of(member.rank, plans_of(loaded_by))
        with Module(plan, seed=8, device="cpu", ranks=member if loaded_by > 1 else None) as net:
            net.load(file)
            return steps(net, member.rank, [rows(1)])

    run_ranks(saved_by, save)
    assert [path.name for path in tmp_path.iterdir()] == ["states"]  # of rank 0
    (expected,) = trained(1, plans_of(1), [rows(0), rows(1)])
    for one in run_ranks(loaded_by, load):
        assert distance(expected, one) <= 1e-12
        assert one.control == expected.control


def test_a_forward_pass_is_each_ranks_own():
    image, _ = rows(0)

    def body(member: ThreadRank) -> np.ndarray:
        with Module(plan_of(member.rank, plans_of(3)), seed=3, device="cpu", ranks=member) as net:
            assert (net.rank, net.ranks) == (member.rank, 3)
            assert net.batch == (4 if member.rank == 0 else 3)
            return np.asarray(net.forward(image[:2])) if member.rank == 1 else np.empty(0)

    with Module(plans_of(1)[0], seed=3, device="cpu") as net:
        assert (net.rank, net.ranks, net.batch) == (0, 1, BATCH)
        np.testing.assert_allclose(run_ranks(3, body)[1], net.forward(image[:2]), rtol=1e-12)


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mbc.runtime.membership.joined", lambda: None)


@pytest.mark.parametrize(
    ("planned", "size", "message", "remedy"),
    [
        (2, 1, "the plan is for 2 GPUs that share each mini-batch, but only this process was started",
         "start 2 processes (mpirun, srun, torchrun, or mbc train --gpus 2), or compile with --gpus 1"),
        (3, 2, "the plan is for 3 GPUs that share each mini-batch, but 2 processes were started",
         "start 3 processes (mpirun, srun, torchrun, or mbc train --gpus 3), or compile with --gpus 2"),
        (1, 4, "the plan is for one GPU, but 4 processes were started",
         "start one process, or compile with --gpus 4"),
    ],
)  # fmt: skip
def test_another_number_of_processes_is_refused(planned: int, size: int, message: str, remedy: str):
    ranks = None if planned == 1 else Ranks((5,) * planned, tuple(range(planned)))
    with pytest.raises(MbcError) as caught:
        check_size(ranks, size)
    assert (caught.value.code, caught.value.message, caught.value.remedy) == ("MBC281", message, remedy)
    check_size(ranks, planned)


def test_a_process_alone_opens_no_plan_of_several(monkeypatch: pytest.MonkeyPatch):
    alone(monkeypatch)
    with pytest.raises(MbcError, match="but only this process was started") as caught:
        Module(plans_of(2)[0], device="cpu")
    assert caught.value.code == "MBC281"
    assert check_membership(plans_of(1)[0].graph, None) is None


def test_a_plan_of_other_ranks_is_refused():
    def body(member: ThreadRank) -> None:
        if member.rank == 2:
            with pytest.raises(MbcError, match=r"the plan is for the ranks \[0\], but this is rank 2") as caught:
                open_plan(plans_of(3)[0], member)
            assert caught.value.code == "MBC281"

    run_ranks(3, body)


def test_a_package_holds_the_plans_of_all_ranks(tmp_path: Path):
    plans = plans_of(3)
    write_package(plans, tmp_path / "net_of_three", find_toolchain({"PATH": ""}, Places()))
    assert [rank_folder(plan) for plan in plans] == ["rank0", "rank1"]
    assert [path.name for path in (tmp_path / "net_of_three").glob("rank*")] == ["rank1"]

    def body(member: ThreadRank) -> tuple[Path | None, Trained]:
        plan, folder, opened_by = open_plan(tmp_path / "net_of_three", member)
        assert opened_by is member and plan == plan_of(member.rank, plans)
        with Module(tmp_path / "net_of_three", seed=3, device="cpu", ranks=member) as net:
            return folder, steps(net, member.rank, [rows(0)])

    results = run_ranks(3, body)
    folders = [folder for folder, _ in results]
    assert folders == [tmp_path / "net_of_three" / inside for inside in (".", "rank1", "rank1")]
    (expected,) = trained(1, plans_of(1), [rows(0)])
    assert all(distance(expected, one) <= 1e-12 for _, one in results)


def test_ranks_with_plans_of_different_networks_do_not_begin():
    other = plans_of(2)[0]
    other = replace(other, graph=replace(other.graph, name="other"))

    def body(member: ThreadRank) -> None:
        open_plan(plans_of(2)[0] if member.rank == 0 else other, member)

    with pytest.raises(MbcError, match=r"the ranks differ in plan: \w+ on rank 0; \w+ on rank 1") as caught:
        run_ranks(2, body)
    assert caught.value.code == "MBC263"


FEW = frozenset({"offload", "recompute"})  # most seconds of a plan within a budget go to these


@cache
def unlike(*gpus: RankGpu) -> tuple[Plan, ...]:
    settings = (("train.precision", "fp32"), ("batch", "40"))
    options = Options(settings=settings, gpus=len(gpus), rank_gpus=gpus, without=FEW)
    return compile_plans(Source("net.mbc", NORMALISED % ""), options)


@pytest.mark.parametrize(
    ("other", "architecture"), [("t4", "sm_75"), pytest.param("h200@16", "sm_90", marks=pytest.mark.exhaustive)]
)
def test_unlike_gpus_train_as_one(other: str, architecture: str):
    """Each GPU has its own kernels and rows, but all use one order of collectives."""
    plans = unlike(RankGpu("h200"), RankGpu(other))
    assert [plan.target.architecture for plan in plans] == ["sm_90", architecture]
    assert plans[1].target.multiprocessors < plans[0].target.multiprocessors
    first, second = (plan.graph.ranks for plan in plans)
    assert first is not None and second is not None and first.rows == second.rows and first.batch == 40
    assert first.rows[0] > first.rows[1]
    assert (first.members, second.members) == ((0,), (1,))
    batches = [rows(step, 40) for step in range(3)]
    settings = (("train.precision", "fp32"), ("batch", "40"))
    whole = compile_plan(Source("net.mbc", NORMALISED % ""), Options(gpu="h200", settings=settings))
    (alone,) = trained(1, (whole,), batches)
    one, another = trained(2, plans, batches)
    assert one.figures == another.figures and distance(one, another) == 0
    assert distance(alone, one) <= 5e-5


def test_gpus_of_unlike_memory_have_rows_within_it():
    options = Options("h200", (("train.precision", "fp32"), ("batch", "16")), 2, without=FEW)
    (few,) = compile_plans(Source("net.mbc", NORMALISED % ""), options)
    budget_bytes = few.predictions.arena_bytes + few.predictions.overhead_bytes
    large, small = unlike(RankGpu("h200"), RankGpu("h200", budget_bytes))
    assert small.predictions.arena_bytes + small.predictions.overhead_bytes <= budget_bytes == small.budget_bytes
    assert large.budget_bytes > budget_bytes
    assert large.graph.batch + small.graph.batch == 40 and small.graph.batch < large.graph.batch
    with pytest.raises(MbcError, match="MBC284: no share of 40 rows was found"):
        unlike(RankGpu("h200", budget_bytes - 1024), RankGpu("h200", budget_bytes))
