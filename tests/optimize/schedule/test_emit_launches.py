"""Updates of states as early as possible, but never before the last reader of the state that they replace."""

from __future__ import annotations

import itertools

import pytest

from mbc.compiler import compile_plan
from mbc.hardware.streams import Stream
from mbc.ir.graph import Operation
from mbc.ir.types import DType, Layout
from mbc.ops import KINDS
from mbc.ops.fused import join, names_of
from mbc.optimize.schedule.emit_launches import updates_early
from mbc.optimize.schedule.in_place import in_place_operands, overwritten
from mbc.options import Options
from mbc.plan.model import Access, Buffer, Kernel, Launch, Mode, Rows
from mbc.plan.verify import verify_plan
from mbc.source import Source
from tests.graphs import training_graph
from tests.optimize.planned import NETWORKS, graph_of
from tests.optimize.shared import EXAMPLES

SECTIONS = [
    " ".join(words)
    for words in itertools.product(
        ("optimizer = sgd(momentum=0.9)", "optimizer = lamb(weight_decay=0.1)"),
        ("", "accumulate = 3"),
        ("", "clip_norm = 1.0"),
        ("", "ema = 0.9"),
        ("", 'frozen = "conv*"'),
    )
]
SMALL = """
network a(batch = 4) {
  input x[batch, 3, 8, 8] : float
  input y[batch, 4, 8, 8] : float
  o = x |> conv(8, 3, pad=1) |> relu |> conv(4, 1)
  output o
  loss (o, y) |> mse
}
train { optimizer = sgd(momentum=0.9)  accumulate = 2 }
"""


def misplaced(operations: tuple[Operation, ...]) -> list[str]:
    """Return the names of operations that read a value before it exists, or a state that was already replaced."""
    outputs = {output for operation in operations for output in operation.outputs}
    ready: set[str] = set()
    replaced: set[str] = set()
    wrong: list[str] = []
    for operation in operations:
        if any(name in replaced or (name in outputs and name not in ready) for name in operation.inputs):
            wrong.append(operation.name)
        ready.update(operation.outputs)
        replaced.update(operation.inputs[k] for _, k in KINDS[operation.kind].updates if k < len(operation.inputs))
    return wrong


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("section", SECTIONS)
def test_updates_follow_all_readers_of_the_old_state(network: str, section: str) -> None:
    body, _, _ = NETWORKS[network].partition("train {")
    graph = graph_of(f"{body}train {{ {section} }}\n")
    early = updates_early(graph.train)
    assert sorted(op.name for op in early) == sorted(op.name for op in graph.train)
    assert misplaced(graph.train) == []
    assert misplaced(early) == []


@pytest.mark.parametrize("setting", ["650022220B", "655MB", "1TB"])
def test_a_step_of_several_mini_batches_plans_within_a_budget(setting: str) -> None:
    plan = compile_plan(Source("a.mbc", SMALL), Options(gpu="t4", settings=(("memory.device", setting),)))
    verify_plan(plan)


def test_alexnet_of_two_mini_batches_plans_within_a_budget() -> None:
    source = Source("alexnet.mbc", (EXAMPLES / "alexnet.mbc").read_text(encoding="utf-8"))
    settings = (("batch", "32"), ("train.accumulate", "2"), ("memory.device", "1524701516B"))
    plan = compile_plan(source, Options(gpu="t4", settings=settings))
    verify_plan(plan)
    assert plan.predictions.arena_bytes + plan.predictions.overhead_bytes <= 1524701516


def test_groups_of_the_same_operations_overwrite_what_each_may() -> None:
    graph, rows = training_graph(SMALL), Rows(0, 4)
    members = [op for op in graph.train if op.kind in ("relu", "relu_backward")]
    groups = [join(members, op.outputs) for op in members]  # the first keeps the activation, the second its gradient
    operands = in_place_operands(graph, groups)
    overwrites: list[list[tuple[str, str]]] = []
    for group in groups:
        values = [*group.inputs, *group.outputs]
        buffers = [Buffer(value, rows, Layout.CHANNELS_FIRST, DType.FP32, 1024) for value in values]
        accesses = tuple(Access(i, rows, Mode.READ) for i in range(len(values)))
        launch = Launch(Kernel("mbc", "any", (), 1.0, False), names_of(group), Stream.COMPUTE, accesses)
        overwrites.append([(values[old], values[new]) for old, new in overwritten(launch, buffers, operands)])
    assert overwrites == [[("conv0", "relu0")], [("d.relu0", "d.conv0")]]
