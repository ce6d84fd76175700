"""Plans of several GPUs: right plans are accepted.

Plans that would train each rank alone, sum twice, or sum in another order are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from mbc.compiler import compile_plans
from mbc.errors import MbcError
from mbc.hardware.streams import Stream
from mbc.ir.graph import Operation, Ranks
from mbc.ops.batch_normalize import CombineStatistics
from mbc.ops.collective import AllReduce
from mbc.ops.loss import CrossEntropyBackward
from mbc.ops.weighted_cross_entropy import WeightedMean
from mbc.options import Options
from mbc.plan.file import dump_plan, load_plan
from mbc.plan.model import Plan
from mbc.plan.schema import content_checksum
from mbc.plan.verify import verify_plan
from mbc.plan.verify_ranks import shared_digest, verify_rank, verify_ranks
from mbc.source import Source
from tests.gathering import small_gradients_are_gathered
from tests.plan.chains import random_plan
from tests.plan.shared import collectives, cut, part, plans_of, with_ctas


def refused(check, given, words: str, code: str = "MBC135") -> None:
    with pytest.raises(MbcError, match=re.escape(words)) as caught:
        check(given)
    assert caught.value.code == code


def with_operations(plan: Plan, change) -> Plan:
    """Return the plan in which `change(operation)` returns the operations that replace an operation."""
    train = tuple(changed for op in plan.graph.train for changed in change(op))
    return replace(plan, graph=replace(plan.graph, train=train))


def with_launches(plan: Plan, change) -> Plan:
    """Return the plan in which `change(i, launch)` replaces each launch."""
    launches = tuple(change(i, launch) for i, launch in enumerate(plan.train.launches))
    return replace(plan, train=replace(plan.train, launches=launches))


def of_kind(plan: Plan, kind: str) -> Operation:
    return next(op for op in plan.graph.train if op.kind == kind)


# What is right


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "fp64"])
@pytest.mark.parametrize("gpus", [2, 3])
def test_plans_of_all_ranks_are_accepted(gpus: int, precision: str) -> None:
    plans = plans_of(gpus, precision)
    assert [plan.graph.batch for plan in plans] == ([4] if gpus == 2 else [3, 2])
    for plan in plans:
        verify_plan(plan)
    verify_ranks(plans)
    verify_ranks(plans[::-1])
    # In fp64, which runs on the CPU only, gradients are summed one by one.
    assert all(collectives(plan) for plan in plans) is (precision != "fp64")
    assert len({shared_digest(plan) for plan in plans}) == 1


def test_other_plans_share_another_thing() -> None:
    digests = {shared_digest(plans_of(*way)[0]) for way in ((2, "fp32"), (3, "fp32"), (2, "bf16"), (3, "bf16"))}
    assert len(digests) == 4


def test_plans_that_store_other_things_train_together() -> None:
    """One GPU's plan may keep masks while another's keeps the values from which masks are computed."""
    first, second = plans_of(3)
    ops = second.graph.train
    backward = next(i for i, op in enumerate(ops) if op.kind.endswith("_backward_filter"))
    masked = (*ops[:backward], replace(ops[backward], kind="relu_mask"), *ops[backward + 1 :])
    other = replace(second, graph=replace(second.graph, train=masked))
    assert shared_digest(first) == shared_digest(other)
    losses = tuple(replace(op, kind="mse") if op.kind == "softmax_cross_entropy" else op for op in ops)
    assert losses != ops
    assert shared_digest(first) != shared_digest(replace(second, graph=replace(second.graph, train=losses)))


def test_two_buckets_are_accepted_in_one_order() -> None:
    plans = tuple(cut(plan, 3) for plan in plans_of(3))
    for plan in plans:
        assert len(collectives(plan)) == 2
        verify_rank(plan)
    verify_ranks(plans)


# One plan


def test_an_update_of_this_rank_alone() -> None:
    (plan,) = plans_of(2)
    update = of_kind(plan, "sgd_update")
    gradient = update.inputs[1]
    own = gradient.removeprefix("sum.")
    assert own != gradient
    changed = with_operations(
        plan,
        lambda op: [replace(op, inputs=tuple(own if v == gradient else v for v in op.inputs)) if op == update else op],
    )
    refused(verify_rank, changed, f"'{update.name}' reads '{own}', which is not summed over the ranks")


def test_a_loss_of_this_rank_alone() -> None:
    (plan,) = plans_of(2)
    guard = of_kind(plan, "guard")
    own = guard.inputs[1].removeprefix("sum.")
    changed = with_operations(plan, lambda op: [replace(op, inputs=(op.inputs[0], own)) if op == guard else op])
    refused(verify_rank, changed, f"'{guard.name}' reads '{own}', which is not summed over the ranks")


def test_a_report_of_this_rank_alone() -> None:
    (plan,) = plans_of(2)
    summands = {op.outputs[0]: op.inputs[0] for op in plan.graph.train if op.kind == "all_reduce"}
    (metric,) = plan.graph.metrics
    for graph in (
        replace(plan.graph, loss=summands[plan.graph.loss]),
        replace(plan.graph, metrics=(summands[metric],)),
    ):
        refused(verify_rank, replace(plan, graph=graph), "the step reports '")


def test_a_sum_of_a_sum() -> None:
    (plan,) = plans_of(2)
    first = of_kind(plan, "all_reduce")

    def twice(op: Operation) -> list[Operation]:
        if op != first:
            return [op]
        return [op, replace(op, name="again", inputs=op.outputs, outputs=("twice",))]

    refused(verify_rank, with_operations(plan, twice), "'again' sums a value over ranks that is already summed")


def test_a_sum_that_depends_on_a_sum() -> None:
    (plan,) = plans_of(2)
    update = of_kind(plan, "sgd_update")
    again = replace(of_kind(plan, "all_reduce"), name="again", inputs=update.outputs[:1], outputs=("twice",))
    changed = with_operations(plan, lambda op: [op, again] if op == update else [op])
    refused(verify_rank, changed, "'again' sums a value over ranks that is already summed")


def test_a_sum_of_another_number_of_ranks() -> None:
    (plan,) = plans_of(2)
    first = of_kind(plan, "all_reduce")
    changed = with_operations(plan, lambda op: [replace(op, attributes=AllReduce(3)) if op == first else op])
    refused(verify_rank, changed, f"'{first.name}' is for 3 ranks, but there are 2")


def test_a_collective_on_the_stream_of_kernels() -> None:
    (plan,) = plans_of(2)
    (at,) = collectives(plan)
    changed = with_launches(plan, lambda i, w: replace(w, stream=Stream.COMPUTE) if i == at else w)
    refused(verify_rank, changed, f"launch {at} of train is on the stream 'compute'")


def test_a_kernel_on_the_stream_of_collectives() -> None:
    (plan,) = plans_of(2)
    changed = with_launches(plan, lambda i, w: w if i else replace(w, stream=Stream.COLLECTIVE))
    refused(verify_rank, changed, "launch 0 of train is on the stream 'collective'")


def test_inference_has_no_collective() -> None:
    (plan,) = plans_of(2)
    bucket = plan.train.launches[collectives(plan)[0]]
    changed = replace(plan, infer=replace(plan.infer, launches=(*plan.infer.launches, bucket)))
    refused(verify_rank, changed, "inference sums over ranks")


def test_one_rank_has_no_collective() -> None:
    (plan,) = plans_of(2)
    alone = replace(plan, graph=replace(plan.graph, ranks=None))
    refused(verify_rank, alone, "plans of several GPUs: it sums over ranks, but there is only one")
    verify_rank(random_plan(5))
    bucket = plan.train.launches[collectives(plan)[0]]
    other = random_plan(5)
    for title in ("train", "infer"):
        program = getattr(other, title)
        changed = replace(other, **{title: replace(program, launches=(*program.launches, bucket))})
        refused(verify_rank, changed, "it sums over ranks, but there is only one")


def test_operands_of_a_bucket_are_adjacent() -> None:
    (plan,) = plans_of(2)
    bucket = plan.train.launches[collectives(plan)[0]]
    first, second, *_ = (access.buffer for access in bucket.accesses)
    # Two gradients of equal size exchange their places, with all buffers that overwrite them.
    offsets = list(plan.offsets)
    for buffer, offset in enumerate(plan.offsets):
        if offset in (plan.offsets[first], plan.offsets[second]):
            offsets[buffer] = plan.offsets[second if offset == plan.offsets[first] else first]
    refused(verify_plan, replace(plan, offsets=tuple(offsets)), "its operands are not contiguous", "MBC133")


def test_a_sum_overwrites_its_operand() -> None:
    """A sum must overwrite its operand: a kernel may write elsewhere, but NCCL is given one address."""
    (plan,) = plans_of(2)
    bucket = plan.train.launches[collectives(plan)[0]]
    count = len(bucket.operations)
    total = bucket.accesses[count].buffer
    end = plan.predictions.arena_bytes
    buffers, offsets = list(plan.buffers), list(plan.offsets)
    buffers[total] = replace(buffers[total], alias=None)
    offsets[total] = end
    predictions = replace(plan.predictions, arena_bytes=end + 256)
    changed = replace(plan, buffers=tuple(buffers), offsets=tuple(offsets), predictions=predictions)
    refused(verify_plan, changed, f"a sum is at {end}, not in place of its operand at", "MBC133")


# Plans of all ranks


def test_a_plan_for_each_rank() -> None:
    three, two = plans_of(3)
    refused(verify_ranks, (three,), "they are for the ranks [0, 1], not for each of 3 ranks once")
    refused(verify_ranks, (three, two, two), "they are for the ranks [0, 1, 2, 2], not for each of 3 ranks once")
    refused(verify_ranks, (three, *plans_of(2)), "they share a mini-batch in different ways")
    refused(verify_ranks, (random_plan(5),), "they share a mini-batch in different ways")
    refused(verify_ranks, (three, random_plan(5)), "they share a mini-batch in different ways")


def test_another_order_of_buckets() -> None:
    three, two = (cut(plan, 3) for plan in plans_of(3))
    at, behind = collectives(two)
    swapped = with_launches(two, lambda i, w: two.train.launches[behind if i == at else at if i == behind else i])
    refused(verify_ranks, (three, swapped), "rank 2 runs other collectives than rank 0, or in another order")


@pytest.mark.parametrize("first", [1, 2, 5])
def test_other_members_of_buckets(first: int) -> None:
    three, two = plans_of(3)
    refused(verify_ranks, (cut(three, 3), cut(two, first)), "rank 2 runs other collectives than rank 0")
    refused(verify_ranks, (three, cut(two, first)), "rank 2 runs other collectives than rank 0")


def test_a_bucket_without_one_gradient() -> None:
    three, two = plans_of(3)
    (at,) = collectives(two)
    changed = with_launches(two, lambda i, w: part(w, 1, len(w.operations)) if i == at else w)
    refused(verify_ranks, (three, changed), "rank 2 runs other collectives than rank 0")


def test_other_thread_blocks() -> None:
    three, two = plans_of(3)
    (at,) = collectives(two)
    changed = with_launches(two, lambda i, w: with_ctas(w, 77) if i == at else w)
    refused(verify_ranks, (three, changed), "rank 2 runs other collectives than rank 0")


def test_another_distance_between_gradients() -> None:
    three, two = plans_of(3)
    last = two.train.launches[collectives(two)[0]].accesses[1].buffer
    offsets = [offset + 256 * (i == last) for i, offset in enumerate(two.offsets)]
    refused(verify_ranks, (three, replace(two, offsets=tuple(offsets))), "rank 2 runs other collectives than rank 0")


def test_rows_count_alike() -> None:
    three, two = plans_of(3)
    loss = next(op for op in two.graph.train if isinstance(op.attributes, CrossEntropyBackward))

    def weighted(op: Operation) -> list[Operation]:
        if not isinstance(op.attributes, CrossEntropyBackward):
            return [op]
        return [replace(op, attributes=replace(op.attributes, weight=0.3))]

    refused(
        verify_ranks,
        (three, with_operations(two, weighted)),
        f"rank 2 gives the rows of '{loss.name}' another weight than rank 0",
    )


# Synchronised batch normalisation


SYNCHRONISED = """network net(batch = 5) {
  input image[batch, 3, 8, 8] : float
  input label[batch] : class
  logits = image |> conv(8, 3, pad=1) |> bn(sync=true) |> relu |> flatten |> linear(3)
  output logits
  loss (logits, label) |> softmax_cross_entropy
}
"""


@cache
def synchronised(gpus: int = 3) -> tuple[Plan, ...]:
    return compile_plans(Source("net.mbc", SYNCHRONISED), Options("h200", gpus=gpus))


def with_attributes(plan: Plan, kind: str, **changed: object) -> Plan:
    return with_operations(
        plan, lambda op: [replace(op, attributes=replace(op.attributes, **changed)) if op.kind == kind else op]
    )


def test_statistics_of_all_ranks_are_accepted() -> None:
    for plans in (synchronised(), synchronised(2)):
        for plan in plans:
            verify_plan(plan)
        verify_ranks(plans)


def test_statistics_weighted_otherwise() -> None:
    two, _ = synchronised()
    assert of_kind(two, "combine_statistics").attributes == CombineStatistics((128, 128, 64))
    for counts in ((128, 128, 128), (128, 128)):
        changed = with_attributes(two, "combine_statistics", counts=counts)
        refused(verify_rank, changed, "does not weight the ranks by their rows")


@pytest.mark.parametrize("kind", ["update_running", "batch_normalize_backward"])
def test_elements_of_one_rank_alone(kind: str) -> None:
    two, _ = synchronised()
    refused(verify_rank, with_attributes(two, kind, count=128), "counts 128 elements, but its statistics 320")


def with_inputs(plan: Plan, kind: str, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Plan:
    op = of_kind(plan, kind)
    changed = replace(op, inputs=change(op.inputs))
    return with_operations(plan, lambda operation: [changed if operation == op else operation])


def swapped(inputs: tuple[str, ...], first: int) -> tuple[str, ...]:
    return (*inputs[:first], inputs[first + 1], inputs[first], *inputs[first + 2 :])


def test_sums_of_one_rank_alone() -> None:
    two, _ = synchronised()
    own = of_kind(two, "batch_normalize_backward_reduce").outputs
    broken = with_inputs(two, "batch_normalize_backward", lambda names: (*names[:4], *own, *names[6:]))
    refused(verify_rank, broken, "reads sums and statistics of different ranks")


@pytest.mark.parametrize(
    ("kind", "first"),
    [("batch_normalize", 1), ("batch_normalize_backward_reduce", 2), ("batch_normalize_backward", 2),
     ("update_running", 2)],
)  # fmt: skip
def test_statistics_of_one_rank_alone(kind: str, first: int) -> None:
    two, _ = synchronised()
    own = of_kind(two, "batch_statistics").outputs
    both = with_inputs(two, kind, lambda names: (*names[:first], *own, *names[first + 2 :]))
    half = with_inputs(two, kind, lambda names: (*names[: first + 1], own[1], *names[first + 2 :]))
    for broken in (both, half):
        with pytest.raises(MbcError, match=r"belong together|of one rank only|of different ranks"):
            verify_rank(broken)


@pytest.mark.parametrize("kind", ["combine_statistics", "all_gather"])
def test_mean_and_variance_the_wrong_way_round(kind: str) -> None:
    two, _ = synchronised()
    broken = with_inputs(two, kind, lambda names: swapped(names, 0))
    refused(verify_rank, broken, "which do not belong together")


def test_combined_statistics_are_gathered() -> None:
    two, _ = synchronised()
    own = of_kind(two, "batch_statistics").outputs
    refused(
        verify_rank, with_inputs(two, "combine_statistics", lambda _: own), "does not combine the statistics of all"
    )


def test_gathered_values_come_from_all_ranks() -> None:
    two, _ = synchronised()
    changed = with_attributes(two, "all_gather", ranks=2)
    refused(verify_rank, changed, "is for 2 ranks, but there are 3")


def test_gathers_of_all_ranks_are_in_one_order() -> None:
    two, one = synchronised()
    first, second = collectives(one)[:2]
    swapped = with_launches(one, lambda i, w: one.train.launches[second if i == first else first if i == second else i])
    refused(verify_ranks, (two, swapped), "runs other collectives than rank 0, or in another order")


# Gradients of gathered rows

WIDE = """
network net(batch = 4) {
  input image[batch, 64] : float
  input target[batch] : class
  logits = image |> linear(64, bias=false) |> relu |> linear(64, bias=false) |> relu |> linear(3)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
"""


@cache
def gathering() -> Plan:
    with small_gradients_are_gathered():
        (plan,) = compile_plans(Source("net.mbc", WIDE), Options("h200", (("batch", "8"),), 2))
    verify_plan(plan)
    return plan


def test_rows_are_gathered_by_ranks_of_one_plan() -> None:
    plan = gathering()
    for rows, members in (((4, 4), (0,)), ((4, 3), (0,)), ((4, 4, 4), (0, 1))):
        other = replace(plan, graph=replace(plan.graph, ranks=Ranks(rows, members)))
        with pytest.raises(
            MbcError, match=r"is for ranks that all run one plan|is for 2 ranks, but there are 3"
        ) as caught:
            verify_rank(other)
        assert caught.value.code == "MBC135"


def test_rows_of_all_ranks_for_one_gradient_only() -> None:
    plan = gathering()
    gathers = [op for op in plan.graph.train if op.kind == "gather_rows"]
    assert len(gathers) == 2
    words = "reads rows of all ranks, but only the gradient of a weight may read them"
    for names in (
        lambda names: names[::-1],
        lambda names: (names[0], gathers[0].inputs[1]),  # of all ranks, and of this one alone
        lambda names: (names[0], gathers[1].outputs[1]),  # of two layers
    ):
        refused(verify_rank, with_first(plan, "linear_backward_filter", gathers[0].outputs, names), words)
    last = of_kind(plan, "softmax_cross_entropy_backward")
    refused(
        verify_rank,
        with_operations(plan, lambda op: [replace(op, inputs=(gathers[0].outputs[0],))] if op == last else [op]),
        words,
    )


def with_first(plan: Plan, kind: str, inputs: tuple[str, ...], names: Callable[[tuple[str, ...]], tuple[str, ...]]):
    return with_operations(
        plan, lambda op: [replace(op, inputs=names(op.inputs)) if (op.kind, op.inputs) == (kind, inputs) else op]
    )


def test_a_gradient_of_gathered_rows_is_summed_already() -> None:
    plan = gathering()
    gather = of_kind(plan, "gather_rows")
    (gradient,) = (op for op in plan.graph.train if op.inputs == gather.outputs)
    summing = replace(of_kind(plan, "all_reduce"), name="again", inputs=gradient.outputs, outputs=("twice",))
    changed = with_operations(plan, lambda op: [op, summing] if op == gradient else [op])
    refused(verify_rank, changed, "'again' sums a value over ranks that is already summed")


def test_only_rows_of_a_rank_are_gathered() -> None:
    plan = gathering()
    gather = of_kind(plan, "gather_rows")
    weight = of_kind(plan, "linear").inputs[1]
    changed = with_operations(plan, lambda op: [replace(op, inputs=(weight, op.inputs[1]))] if op == gather else [op])
    refused(verify_rank, changed, f"'{gather.name}' gathers values that have no rows")


def test_an_update_of_this_ranks_rows_alone() -> None:
    plan = gathering()
    gather = of_kind(plan, "gather_rows")
    own = with_first(plan, "linear_backward_filter", gather.outputs, lambda names: gather.inputs)
    refused(verify_rank, own, "which is not summed over the ranks")


# Plan files


@pytest.mark.parametrize("gpus", [2, 3])
def test_ranks_are_kept_by_a_file(gpus: int) -> None:
    for plan in plans_of(gpus):
        text = dump_plan(plan)
        assert load_plan(text, "plan.json") == plan
        assert plan.graph.ranks is not None
        assert json.loads(text)["graph"]["ranks"] == {
            "rows": list(plan.graph.ranks.rows),
            "members": list(plan.graph.ranks.members),
        }


def test_a_file_of_one_gpu_says_nothing_of_ranks() -> None:
    assert "ranks" not in json.loads(dump_plan(random_plan(5)))["graph"]
    assert load_plan(dump_plan(random_plan(5)), "plan.json").graph.ranks is None


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ({"rows": [4], "members": [0]}, "at least 2 ranks share a mini-batch, not 1"),
        ({"rows": [], "members": [0]}, "at least 2 ranks share a mini-batch, not 0"),
        ({"rows": [4, 4], "members": []}, "the ranks [] do not have 4 rows each"),
        ({"rows": [4, 3], "members": [0, 1]}, "the ranks [0, 1] do not have 4 rows each"),
        ({"rows": [3, 4], "members": [0]}, "the ranks [0] do not have 4 rows each"),
        ({"rows": [4, 4], "members": [1, 0]}, "the ranks [1, 0] do not have 4 rows each"),
        ({"rows": [4, 4], "members": [0, 0]}, "the ranks [0, 0] do not have 4 rows each"),
        ({"rows": [4, 4], "members": [0, 2]}, "graph.ranks.members"),
        ({"rows": [4, 0], "members": [0]}, "graph.ranks.rows"),
        ({"rows": [4, -4], "members": [0]}, "graph.ranks.rows"),
        ({"rows": [4, 4.0], "members": [0]}, "graph.ranks.rows"),
        ({"rows": 2, "members": [0]}, "graph.ranks.rows"),
        ({"rows": [4, 4]}, "graph.ranks"),
        ({"rows": [4, 4], "members": [0], "more": 1}, "graph.ranks"),
        ([4, 4], "graph.ranks"),
        ("2", "graph.ranks"),
    ],
)
def test_malformed_ranks(ranks: object, words: str) -> None:
    document = json.loads(dump_plan(plans_of(2)[0]))
    document["graph"]["ranks"] = ranks
    document["checksum"] = content_checksum(document)
    with pytest.raises(MbcError) as caught:
        load_plan(json.dumps(document), "plan.json")
    assert words in caught.value.message, caught.value
    assert caught.value.code in ("MBC114", "MBC115"), caught.value


def test_a_plan_of_ranks_with_other_rows_is_another_plan() -> None:
    (plan,) = plans_of(2)
    other = replace(plan, graph=replace(plan.graph, ranks=Ranks((4, 5), (0,))))
    refused(verify_ranks, (other,), "they are for the ranks [0], not for each of 2 ranks once")
    assert shared_digest(other) != shared_digest(plan)


# Means that classes weight


WEIGHTED = Source(
    "weighted.mbc",
    """network weighted(batch = 6) {
  input x[batch, 3] : float
  input t[batch] : class
  y = x |> linear(4)
  output y
  loss (y, t) |> softmax_cross_entropy(ignore_index=-1, class_weights=(1, 2, 1, 0.5))
}""",
)


def test_class_weights_are_those_of_all_ranks() -> None:
    (plan,) = compile_plans(WEIGHTED, Options(gpu="h200", gpus=2))
    verify_plan(plan)
    verify_ranks((plan,))
    mean, own = of_kind(plan, "weighted_cross_entropy_mean"), of_kind(plan, "class_weight_sum").outputs[0]

    def alone(op: Operation) -> tuple[Operation, ...]:
        return (replace(op, inputs=(*op.inputs[:2], own)) if op is mean else op,)

    refused(verify_rank, with_operations(plan, alone), f"'{mean.name}' is not a mean over the weights of all ranks")

    def all_of_it(op: Operation) -> tuple[Operation, ...]:
        assert isinstance(mean.attributes, WeightedMean)
        return (replace(op, attributes=replace(mean.attributes, share=1.0)) if op is mean else op,)

    refused(verify_rank, with_operations(plan, all_of_it), "counts 1.0 of the mini-batch, but this rank has 0.5")


MEASURED = Source(
    "measured.mbc",
    """network measured(batch = 6) {
  input x[batch, 3] : float
  input t[batch] : class
  y = x |> linear(4)
  output y
  loss (y, t) |> softmax_cross_entropy
  metric iou = (y, t) |> mean_iou
  metric top2 = (y, t) |> top_k(2, ignore_index=3)
  metric dice = (y, t) |> dice(batch=true)
}""",
)


@pytest.mark.parametrize(
    ("kind", "operand", "counts"),
    [
        ("mean_iou_of_overlap", 0, "class_overlap"),
        ("top_k_mean", 2, "class_weight_sum"),
        ("dice_mean", 1, "channel_sum"),
    ],
)
def test_metrics_over_counts_have_those_of_all_ranks(kind: str, operand: int, counts: str) -> None:
    (plan,) = compile_plans(MEASURED, Options(gpu="h200", gpus=2))
    verify_plan(plan)
    verify_ranks((plan,))
    metric, own = of_kind(plan, kind), of_kind(plan, counts).outputs[0]

    def alone(op: Operation) -> tuple[Operation, ...]:
        inputs = (*op.inputs[:operand], own, *op.inputs[operand + 1 :])
        return (replace(op, inputs=inputs) if op is metric else op,)

    refused(verify_rank, with_operations(plan, alone), f"'{metric.name}' is not a mean over the weights of all ranks")
