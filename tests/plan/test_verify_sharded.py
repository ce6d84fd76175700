"""Plans with sharded optimizer states.

Plans that would not update a part of a parameter, update it twice, or keep it from other ranks are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

from mbc.compiler import compile_plans
from mbc.errors import MbcError
from mbc.ir.graph import Operation, Ranks
from mbc.ops.shard import ReduceScatter
from mbc.options import Options
from mbc.plan.file import dump_plan, load_plan
from mbc.plan.model import Kernel, Plan
from mbc.plan.verify import verify_plan
from mbc.plan.verify_ranks import verify_rank, verify_ranks
from mbc.source import Source

SOURCE = """network net(batch = 8) {
  input image[batch, 3, 6, 6] : float
  input label[batch] : class
  x = image |> conv(64, 3, pad=1) |> relu |> conv(66, 3, pad=1, stride=2) |> relu |> flatten
  logits = x |> linear(70) |> linear(4)
  output logits
  loss (logits, label) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9)  clip_norm = 1  shard_optimizer = true }
"""


@cache
def plan_of(precision: str = "fp32", gpus: int = 2) -> Plan:
    options = Options(gpu="h200", gpus=gpus, settings=(("train.precision", precision), ("batch", str(4 * gpus))))
    (plan,) = compile_plans(Source("net.mbc", SOURCE), options)
    return plan


def of_kind(kind: str) -> list[Operation]:
    return [op for op in plan_of().graph.train if op.kind == kind]


def changed(change: Callable[[Operation], list[Operation]]) -> Plan:
    plan = plan_of()
    train = tuple(changed for op in plan.graph.train for changed in change(op))
    return replace(plan, graph=replace(plan.graph, train=train))


def in_place_of(old: Operation, *new: Operation) -> Plan:
    return changed(lambda op: [*new] if op == old else [op])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("gpus", [2, 3])
def test_plans_are_accepted_and_read_back(precision: str, gpus: int) -> None:
    plan = plan_of(precision, gpus)
    verify_plan(plan)
    verify_ranks([plan])
    assert load_plan(dump_plan(plan), "plan.json") == plan


def wrong_parts() -> Iterator[tuple[Plan, str]]:
    """Yield plans whose parts are wrong, with words of the message."""
    (scatter, *_), (update, *_) = of_kind("reduce_scatter"), of_kind("sgd_update_part")
    (gather, *_, last_gather), (norm,) = of_kind("gather_parts"), of_kind("norm")
    yield from (
        # A part that is not updated, is updated twice, or whose gradient's norm is not seen, or seen twice.
        (in_place_of(update), f"'{scatter.name}' is this rank's part of a sum, but is read by norm"),
        (
            in_place_of(update, update, replace(update, name="again", outputs=("again", "again.momentum"))),
            "but is read by norm and sgd_update_part and sgd_update_part",
        ),
        (in_place_of(norm, replace(norm, inputs=norm.inputs[1:])), "but is read by sgd_update_part"),
        (in_place_of(norm, replace(norm, inputs=(*norm.inputs, norm.inputs[0]))), "but is read by norm and norm and"),
        # A new part that is not gathered, that is gathered twice, or over another parameter.
        (in_place_of(gather), f"updates a part of '{gather.inputs[1]}', which the ranks do not gather once"),
        (
            in_place_of(gather, gather, replace(gather, name="again", outputs=("again",))),
            f"updates a part of '{gather.inputs[1]}', which the ranks do not gather once",
        ),
        (
            in_place_of(gather, replace(gather, inputs=(gather.inputs[0], last_gather.inputs[1]))),
            "which the ranks do not gather once",
        ),
        (
            in_place_of(gather, gather, replace(gather, name="raw", inputs=(update.inputs[3], update.inputs[0]))),
            f"'raw' gathers a value that is not an update of '{update.inputs[0]}'",
        ),
        # The norm of a value that is not a part, or a norm that other ranks do not get.
        (
            in_place_of(norm, norm, replace(norm, name="whole", inputs=(gather.inputs[1],), outputs=("n",))),
            "'whole' is not a norm of parts of gradients that all ranks gather",
        ),
        (
            changed(lambda op: [] if op.kind == "all_gather" and op.inputs == norm.outputs else [op]),
            "is not summed over the ranks",
        ),
    )  # fmt: skip


def test_wrong_parts_are_refused() -> None:
    for plan, words in wrong_parts():
        with pytest.raises(MbcError, match=re.escape(words)) as caught:
            verify_rank(plan)
        assert caught.value.code == ("MBC135" if words == "is not summed over the ranks" else "MBC136")


def test_a_part_of_other_ranks() -> None:
    scatter, *_ = of_kind("reduce_scatter")
    with pytest.raises(MbcError, match=r"MBC135: .*is for 3 ranks, but there are 2"):
        verify_rank(in_place_of(scatter, replace(scatter, attributes=ReduceScatter(3))))


def test_a_part_of_a_gradient_that_no_rank_summed() -> None:
    (scatter, *_), (update, *_) = of_kind("reduce_scatter"), of_kind("sgd_update_part")
    own = replace(update, inputs=(update.inputs[0], scatter.inputs[0], *update.inputs[2:]))
    with pytest.raises(MbcError, match=r"MBC135: .*reads 'd\..*which is not summed over the ranks"):
        verify_rank(in_place_of(update, own))


def test_ranks_of_which_some_run_another_plan() -> None:
    plan = plan_of()
    graph = replace(plan.graph, ranks=Ranks((4, 4), (0,)))
    with pytest.raises(MbcError, match=r"MBC136: .*is for ranks that all run one plan"):
        verify_rank(replace(plan, graph=graph))


def test_a_sum_that_is_scattered_again() -> None:
    scatter, *_, last = of_kind("reduce_scatter")
    twice = replace(last, name="twice", inputs=scatter.outputs, outputs=("twice",))
    with pytest.raises(MbcError, match=r"'twice' sums a value over ranks that is already summed"):
        verify_rank(in_place_of(last, last, twice))


@pytest.mark.parametrize("name", ["reduce_scatter", "gather_parts"])
def test_a_launch_that_does_something_else(name: str) -> None:
    """The launch has another collective's kernel, uses copy engines, or leaves out a tensor."""
    plan = plan_of()
    at, launch = next(
        (i, w) for i, w in enumerate(plan.train.launches) if isinstance(w.work, Kernel) and w.work.name == name
    )
    assert isinstance(launch.work, Kernel)

    def with_launch(new: object) -> Plan:
        launches = tuple(new if i == at else w for i, w in enumerate(plan.train.launches))
        return replace(plan, train=replace(plan.train, launches=launches))

    for work, code in (
        (replace(launch.work, name="all_reduce"), "MBC133"),
        (replace(launch.work, settings=(("ctas", 0),)), "MBC133"),
    ):
        with pytest.raises(MbcError) as caught:
            verify_plan(with_launch(replace(launch, work=work)))
        assert caught.value.code == code
    with pytest.raises(MbcError) as caught:
        verify_plan(with_launch(replace(launch, operations=launch.operations[1:])))
    assert caught.value.code in ("MBC123", "MBC127")


def test_sums_over_mini_batches_are_of_one_rank_alone() -> None:
    source = SOURCE.replace("clip_norm = 1  shard_optimizer = true", "accumulate = 2  shard_optimizer = false")
    (plan,) = compile_plans(Source("net.mbc", source), Options(gpu="h200", gpus=2))
    verify_rank(plan)

    def own(op: Operation) -> Operation:
        kept = tuple(name.replace("sum.copy.accumulated.d.", "before.d.") for name in op.inputs)
        return replace(op, inputs=kept) if op.kind == "sgd_update" else op

    train = tuple(own(op) for op in plan.graph.train)
    with pytest.raises(MbcError, match=r"reads 'before\.d\..*', which is not summed over the ranks"):
        verify_rank(replace(plan, graph=replace(plan.graph, train=train)))
