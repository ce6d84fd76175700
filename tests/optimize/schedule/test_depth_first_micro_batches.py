"""Micro-batches in depth-first order compute equal bits in less memory."""

from __future__ import annotations

import pytest

from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.select_groups import Programs
from mbc.optimize.schedule.depth_first_groups import Division
from mbc.optimize.schedule.depth_first_micro_batches import depth_first, divided_operations
from mbc.optimize.schedule.emit_launches import Draft, emit_launches
from mbc.optimize.schedule.in_place import alias_in_place
from mbc.optimize.selection.select import choose
from mbc.plan.model import Plan
from mbc.plan.verify import verify_plan
from mbc.runtime.launch_order import Transfers
from tests.optimize.planned import kept_plan, plan_of, table, trained

CASES = [
    ("residual", "fp32", 2),
    ("residual", "bf16", 4),
    ("dense", "fp32", 1),
    ("dense", "fp32", 2),
    ("dense", "fp16", 2),
]


def drafts_of(network: str, precision: str, rows: int, large_bytes: int) -> tuple[Draft, Draft]:
    """Return two drafts with divided operations: one after another, and depth-first."""
    tabulated = table(network, precision)
    return divided_drafts(tabulated, Division(large_bytes, rows))


def divided_drafts(
    tabulated: CandidateTable, division: Division, programs: Programs | None = None
) -> tuple[Draft, Draft]:
    """Return two drafts with divided operations or groups: one after another, and depth-first."""
    whole = choose(tabulated, {}, None, programs)
    operations = (*whole.train, *whole.infer)
    divided = divided_operations(tabulated, emit_launches(tabulated, whole), operations, division)
    draft = emit_launches(tabulated, choose(tabulated, {}, divided, programs))
    return draft, depth_first(tabulated, draft, operations, division)


def plan(network: str, precision: str, draft: Draft) -> Plan:
    return plan_of(kept_plan(network, precision), alias_in_place(table(network, precision).graph, draft))


@pytest.mark.parametrize("large_bytes", [0, 400, 1500, 3000])
@pytest.mark.parametrize(("network", "precision", "rows"), CASES)
def test_depth_first_execution_gives_the_same_bits(network: str, precision: str, rows: int, large_bytes: int) -> None:
    whole, by_depth = drafts_of(network, precision, rows, large_bytes)
    plans = [plan(network, precision, draft) for draft in (whole, by_depth)]
    for each in plans:
        verify_plan(each)
    assert trained(plans[0], Transfers.IN_ORDER) == trained(plans[1], Transfers.IN_ORDER)
