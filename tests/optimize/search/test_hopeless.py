"""A budget far below what was found is refused without trying every kind of step."""

from __future__ import annotations

import pytest

from mbc.compiler import compile_plan
from mbc.errors import BudgetError
from mbc.optimize.search import search
from mbc.options import Options
from mbc.source import Source
from tests.optimize.shared import EXAMPLES

SETTINGS = (("depth", "18"), ("batch", "128"), ("size", "64"), ("width", "16"), ("classes", "10"))
KEPT = frozenset({"offload", "recompute"})


def test_other_kinds_of_steps_are_tried_near_the_budget_only(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source("resnet.mbc", (EXAMPLES / "resnet.mbc").read_text(encoding="utf-8"))
    free = compile_plan(source, Options("h200", SETTINGS, without=KEPT)).predictions
    fits: list[object] = []
    fit = search.fit
    monkeypatch.setattr(search, "fit", lambda problem, *rest: (fits.append(problem), fit(problem, *rest))[1])

    def refused(share: float) -> tuple[int, str]:
        fits.clear()
        budget = f"{free.overhead_bytes + int(share * free.arena_bytes)}B"
        with pytest.raises(BudgetError) as caught:
            compile_plan(source, Options("h200", (*SETTINGS, ("memory.device", budget)), without=KEPT))
        assert caught.value.code == "MBC204"
        return len(fits), str(caught.value)

    few, hopeless = refused(0.4)
    many, near = refused(0.7)
    assert few == 1 < many
    assert "or less: so far below it few kinds of plans are tried" in hopeless
    assert "or less: each budget is searched anew" in near
