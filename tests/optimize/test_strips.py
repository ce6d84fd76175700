"""Strips compute the same bits in less memory."""

from __future__ import annotations

import pytest

from mbc.optimize.choose import choose
from mbc.optimize.order import Draft, order
from mbc.optimize.strips import Division, divided_operations, interleaved
from mbc.optimize.takeover import take_over
from mbc.plan.model import Plan
from mbc.plan.verify import verify_plan
from mbc.runtime.transfers import Transfers
from tests.optimize.planned import draft_of, kept_plan, plan_of, table
from tests.optimize.test_residence import trained

CASES = [
    ("residual", "fp32", 2),
    ("residual", "bf16", 4),
    ("dense", "fp32", 1),
    ("dense", "fp32", 2),
    ("dense", "fp16", 2),
]


def stripped(network: str, precision: str, rows: int, large_bytes: int) -> tuple[Draft, Draft]:
    """Divided operations one after another, and in strips."""
    made = table(network, precision)
    division = Division(large_bytes, rows)
    divided = divided_operations(made, draft_of(network, precision), division)
    draft = order(made, choose(made, {}, divided))
    return draft, interleaved(made, draft, division)


def plan(network: str, precision: str, draft: Draft) -> Plan:
    return plan_of(kept_plan(network, precision), take_over(table(network, precision).graph, draft))


@pytest.mark.parametrize("large_bytes", [0, 400, 1500, 3000])
@pytest.mark.parametrize(("network", "precision", "rows"), CASES)
def test_strips_give_the_same_bits(network: str, precision: str, rows: int, large_bytes: int) -> None:
    whole, strips = stripped(network, precision, rows, large_bytes)
    plans = [plan(network, precision, draft) for draft in (whole, strips)]
    for found in plans:
        verify_plan(found)
    assert trained(plans[0], Transfers.IN_ORDER) == trained(plans[1], Transfers.IN_ORDER)
