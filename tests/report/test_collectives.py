"""Reports about the collectives of plans for several GPUs."""

from __future__ import annotations

from functools import cache

import pytest

from mbc.compiler import compile_plans
from mbc.hardware.collective_times import CollectiveKind, bus_share
from mbc.ir.graph import Role
from mbc.optimize.schedule.simulate import timeline
from mbc.options import Options
from mbc.plan.collectives import is_collective, sharing_of
from mbc.plan.model import Plan
from mbc.report import collectives
from mbc.report.collectives import collectives_document, collectives_lines, collectives_of, collectives_text, ranks_text
from mbc.report.tables import batch_text
from mbc.source import Source

# Wide enough that some of its gradients travel while others are computed.
WIDE = """
network wide(batch = 64) {
  input image[batch, 64, 32, 32] : float
  input target[batch] : class
  x = image
  for n in range(4) {
    x = x |> conv(512, 3, pad=1) |> bn |> relu
  }
  logits = x |> global_avgpool |> linear(10)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9)  precision = bf16 }
"""


@cache
def plans(gpus: int) -> tuple[Plan, ...]:
    return compile_plans(Source("wide.mbc", WIDE), Options(gpu="h200", gpus=gpus))


def test_the_timeline_is_that_of_the_planner() -> None:
    for plan in (*plans(2), *plans(3)):
        times = timeline(plan.train, contention=collectives._contention(plan))
        assert times.total_us == pytest.approx(plan.predictions.train_us, rel=1e-12)


def test_hidden_and_exposed() -> None:
    (plan,) = plans(2)
    collectives = collectives_of(plan)
    assert collectives is not None and len(collectives.sharing.buckets) > 1
    # No kernel runs beside the last sum, which the guard waits for; the first is hidden by the rest of the backward
    # pass.
    assert collectives.exposed_us[-1] > 0 and collectives.exposed_us[0] == pytest.approx(0.0, abs=1e-9)
    assert collectives.hidden_us > 0 and all(
        0 <= e <= t for e, t in zip(collectives.exposed_us, collectives.times_us, strict=True)
    )
    # What the step takes longer than its kernels, which all run on one stream, is exposed, or lost by kernels.
    kernels_us = sum(launch.work.time_us for launch in plan.train.launches if not is_collective(launch))
    more_us = plan.predictions.train_us - kernels_us
    assert collectives.slowed_us > 0 and more_us >= sum(collectives.exposed_us) + collectives.slowed_us - 1e-6


def test_a_bucket_spans_its_gradients() -> None:
    sharing = sharing_of(plans(2)[0])
    assert sharing is not None
    graph = plans(2)[0].graph
    sums = [name for op in graph.train if op.kind == "all_reduce" for name in op.inputs]
    assert sum(bucket.tensors for bucket in sharing.buckets) == len(sums)
    least = sum(graph.values[name].type.size_bytes for name in sums)
    assert least <= sharing.size_bytes < least + 256 * len(sums)


def test_traffic_of_a_link() -> None:
    for gpus, carried in ((2, 1.0), (3, 4 / 3)):
        document = collectives_document(plans(gpus)[0])
        assert document is not None and document["ranks"] == gpus
        assert document["link_bytes"] == pytest.approx(document["bytes"] * carried, abs=1)
        assert carried == pytest.approx(bus_share(CollectiveKind.ALL_REDUCE, gpus))
        assert document["exposed_us"] + document["hidden_us"] == pytest.approx(document["time_us"])


def test_what_is_printed() -> None:
    assert [batch_text(plan) for plan in plans(3)] == ["batch 64 shared by 3 GPUs (22 + 2 x 21 rows)"] * 2
    assert [ranks_text(members) for members in ((2,), (0, 1), (3, 4, 5))] == ["rank 2", "ranks 0 and 1", "ranks 3 to 5"]
    lines = collectives_lines(plans(2)[0])
    assert [line.split()[0] for line in lines] == ["all-reduce", "links", "hidden", "exposed"]
    text = collectives_text(plans(2)[0], None)
    sharing = sharing_of(plans(2)[0])
    assert sharing is not None and all(f"launch {bucket.launch} " in text for bucket in sharing.buckets)


def test_what_is_sharded() -> None:
    settings = (("train.shard_optimizer", "true"),)
    (plan,) = compile_plans(Source("wide.mbc", WIDE), Options(gpu="h200", gpus=2, settings=settings))
    collectives = collectives_of(plan)
    assert collectives is not None
    sharing, values = collectives.sharing, plan.graph.values
    weights = [value.type for value in values.values() if value.role is Role.PARAMETER and len(value.type.shape) > 1]
    whole_bytes = sum(weight.size_bytes for weight in weights)
    assert (sharing.state_bytes, sharing.whole_state_bytes) == (whole_bytes // 2, whole_bytes)
    for kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER):
        of_kind = [bucket for bucket in sharing.shards if bucket.kind is kind]
        assert len(of_kind) > 1 and sum(bucket.size_bytes for bucket in of_kind) == whole_bytes
        # The first travels beside kernels, updates and gradients of other buckets.
        assert collectives.exposed_us[sharing.all_buckets.index(of_kind[0])] == pytest.approx(0.0, abs=1e-9)
    # Half of the bytes that an all-reduce sends each way, twice.
    assert sharing.link_bytes == pytest.approx(whole_bytes + sharing.size_bytes, abs=2)
    lines = collectives_lines(plan)
    assert [line.split()[0] for line in lines] == [
        "sharded", "reduce-scatter", "all-gather", "all-reduce", "links", "hidden", "exposed"
    ]  # fmt: skip
    assert (
        "14.1 MiB of 28.1 MiB of optimizer states on each of 2 GPUs" in lines[0] and "that collectives take" in lines[5]
    )
    text = collectives_text(plan, None)
    assert all(f"launch {bucket.launch} " in text for bucket in sharing.all_buckets)
    document = collectives_document(plan)
    assert document is not None and document["state_bytes"] * 2 == document["whole_state_bytes"] == whole_bytes
    assert {bucket["kind"] for bucket in document["buckets"]} == {"all_reduce", "reduce_scatter", "all_gather"}


def test_nothing_of_one_gpu_and_of_cpus() -> None:
    alone = plans(1)[0]
    assert collectives_of(alone) is None and collectives_lines(alone) == [] and collectives_text(alone, None) == ""
    assert batch_text(alone) == "batch 64" and collectives_document(alone) is None
    small = (("batch", "2"), ("train.precision", "fp64"))
    (on_cpu,) = compile_plans(Source("wide.mbc", WIDE), Options(gpu="h200", gpus=2, settings=small))
    assert collectives_of(on_cpu) is None and sharing_of(on_cpu) is not None


def test_nested_intervals() -> None:
    covered_us = collectives._covered_us
    assert covered_us((2.0, 8.0), []) == 0.0
    assert covered_us((2.0, 8.0), [(0.0, 3.0), (2.5, 4.0), (7.0, 9.0), (9.0, 10.0)]) == 3.0
    assert covered_us((2.0, 8.0), [(0.0, 10.0), (3.0, 4.0)]) == 6.0
