"""A launch for many small operations processes their operands element by element."""

from __future__ import annotations

from dataclasses import replace

from mbc.ir.types import Layout
from mbc.kernels.providers import PROVIDERS
from mbc.ops.fused import names_of
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.fusion.horizontal import fuse_horizontally
from mbc.optimize.selection.select import choose
from tests.optimize.planned import H200, table

FLIPPED = {Layout.CHANNELS_FIRST: Layout.CHANNELS_LAST, Layout.CHANNELS_LAST: Layout.CHANNELS_FIRST}


def test_a_cast_that_changes_the_layout_keeps_a_launch_of_its_own() -> None:
    graph = table("residual", "bf16").graph
    candidates = CandidateTable(graph, H200, PROVIDERS, None, Rules())
    selected = choose(candidates, {})
    values = {o.name: graph.values[o.inputs[0]] for o in selected.infer if o.kind == "cast"}
    casts = [
        o for o in selected.infer if o.name in values and values[o.name].type.ordered and not values[o.name].per_sample
    ]
    assert len(casts) > 2

    def gathered(choices, operations=selected.infer) -> set[str]:
        program = fuse_horizontally(candidates, operations, choices).program
        return {name for o in program if o.kind.startswith("cast") for name in names_of(o) if len(names_of(o)) > 1}

    assert {o.name for o in casts} <= gathered(selected.operations)
    changed = dict(selected.operations)
    for i, cast in enumerate(casts):
        layout = changed[cast.name].layouts[0]
        changed[cast.name] = replace(changed[cast.name], layouts=(layout, FLIPPED[layout]))
        assert i > 0 or {o.name for o in casts[1:]} <= gathered(changed)
        for operations in (selected.infer, tuple(casts)):  # of the casts alone, one is left in the end, and then none
            assert gathered(changed, operations).isdisjoint(o.name for o in casts[: i + 1])
