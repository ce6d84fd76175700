"""Updates at once: dropouts read a copy of the control block, so that gradients are freed before the last dropout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mbc.passes.training_step as training_step
from mbc.compiler import compile_plan
from mbc.ir.graph import TrainingGraph
from mbc.kernels.providers import PROVIDERS
from mbc.optimize import effort
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.fusion.select_groups import Fusion
from mbc.optimize.schedule.emit_launches import emit_launches
from mbc.optimize.schedule.liveness import blocks, peak_bytes
from mbc.optimize.schedule.split_updates import split_within
from mbc.optimize.search.search import Limits, search
from mbc.optimize.selection.select import choose
from mbc.options import Options
from mbc.plan.model import Copy
from mbc.plan.verify import verify_plan
from mbc.runtime.launch_order import Transfers
from mbc.source import Source
from tests.effort import examples
from tests.optimize.planned import H200, Favouring, graph_of, plan_of
from tests.optimize.remat.test_apply_decisions import trained

SOURCE = """
network drawn(batch = 3) {{
  input image[batch, 2, 4, 4] : float
  input target[batch] : class
  logits = image |> conv(4, 3) |> dropout(0.3) |> flatten {layers} |> linear(5)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}}
train {{ optimizer = {optimizer} {clip} }}
"""


def source_of(layers: list[tuple[int, bool]], optimizer: str = "sgd(momentum=0.9)", clip: str = "") -> str:
    text = " ".join(f"|> linear({width}) |> relu" + " |> dropout(0.5)" * drops for width, drops in layers)
    return SOURCE.format(layers=text, optimizer=optimizer, clip=clip)


def without_copy(graph: TrainingGraph) -> TrainingGraph:
    """Return the graph with the random numbers drawn from the control block itself."""
    kept = [op for op in graph.train if op.kind != "copy_control"]
    named = {"copy.control": "control"}
    train = tuple(replace(op, inputs=tuple(named.get(v, v) for v in op.inputs)) for op in kept)
    return replace(graph, train=train, values={n: v for n, v in graph.values.items() if n not in named})


LAYERS = st.lists(st.tuples(st.sampled_from((16, 64, 256)), st.booleans()), min_size=1, max_size=4)


@given(layers=LAYERS, optimizer=st.sampled_from(("sgd(momentum=0.9)", "sgd()", "adamw()")))
@settings(max_examples=examples(6, 20), deadline=None)
def test_updates_at_once_lower_the_peak_and_keep_all_bits(layers: list[tuple[int, bool]], optimizer: str) -> None:
    graph = graph_of(source_of(layers, optimizer))
    results, peaks = [], []
    for here in (graph, without_copy(graph)):
        table = CandidateTable(here, H200, tuple(map(Favouring, PROVIDERS)), None, Rules())
        plan = search(table, Limits(1 << 40))
        draft = emit_launches(table, choose(table, {}, programs=Fusion.of(table).programs()))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(effort, "UPDATE_PART_MIN_US", 0.0)
            divided = split_within(draft, 1, table)
        persistent = frozenset(draft.persistent)
        peaks += [peak_bytes(blocks(d.train, d.buffers, persistent))[0] for d in (divided, draft)]
        for trial in (plan, plan_of(plan, divided)):
            verify_plan(trial)
            results.append(trained(trial, Transfers.IN_ORDER))
    assert all(result == results[0] for result in results)
    at_once, behind, waiting, together = peaks
    assert at_once <= behind and at_once <= waiting <= together
    if all(drops for _, drops in layers) and len(layers) > 1:
        assert at_once < waiting


@pytest.mark.parametrize(
    ("source", "copied"),
    [
        (source_of([(16, True)]), True),
        (source_of([(16, True)], clip="clip_norm = 1.0"), False),
        (source_of([(16, True)], clip="accumulate = 2"), False),
        (source_of([(16, False)]).replace("|> dropout(0.3) ", ""), False),
    ],
)
def test_the_control_block_is_copied_where_updates_would_wait(source: str, copied: bool) -> None:
    assert any(op.kind == "copy_control" for op in graph_of(source).train) == copied


def test_alexnet_offloads_nothing_at_80_percent_of_its_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """States and gradients are most of the arena of a small mini-batch, in the order of the source."""
    monkeypatch.setattr(training_step, "order_operations", lambda operations, _: [*operations])
    source = Source("alexnet.mbc", Path("examples/alexnet.mbc").read_text(encoding="utf-8"))
    whole = compile_plan(source, Options(gpu="h200", settings=(("batch", "32"),)))
    budget_bytes = int(0.8 * whole.predictions.arena_bytes) + whole.predictions.overhead_bytes
    tight = compile_plan(source, Options(gpu="h200", settings=(("batch", "32"), ("memory.device", f"{budget_bytes}B"))))
    assert not any(isinstance(launch.work, Copy) for launch in tight.train.launches)
    assert tight.predictions.train_us < 1.01 * whole.predictions.train_us
