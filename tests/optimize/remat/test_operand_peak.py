"""The operand peak: no decision takes a draft below the bytes that its launches touch at once.

Where these exceed the available bytes, nothing is searched.
"""

from __future__ import annotations

import itertools

import pytest

from mbc.hardware.streams import Space
from mbc.optimize.fusion.select_groups import Fusion
from mbc.optimize.remat import greedy
from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.optimize.remat.draft_state import RematTask, Residency
from mbc.optimize.remat.greedy import choose_residency
from mbc.optimize.remat.optimizer_offload import offload_states, states_to_offload
from mbc.optimize.schedule.depth_first_groups import Division
from mbc.optimize.selection.select import choose
from tests.optimize.fusion.test_select_groups import table as fused_table
from tests.optimize.fusion.unclustered import UNCLUSTERED
from tests.optimize.planned import draft_of, table
from tests.optimize.remat.test_greedy import BOTH, OFFLOAD, RECOMPUTE
from tests.optimize.remat.test_local_search import SEEDS, WORK, residency
from tests.optimize.schedule.test_depth_first_fused import graph
from tests.optimize.schedule.test_depth_first_micro_batches import divided_drafts


@pytest.mark.parametrize("techniques", [RECOMPUTE, OFFLOAD, BOTH], ids=["recompute", "offload", "both"])
@pytest.mark.parametrize("part", [0.9, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (0.5, 0.2)), 0.02])
def test_no_decision_goes_below(techniques: AllowedTechniques, part: float) -> None:
    for seed in SEEDS[:2]:
        result, _ = residency(seed, techniques, WORK, part)
        assert 0 < result.least_bytes <= result.live_bytes


RESIDUAL = """
network residual(batch = 8, classes = 5) {
  input image[batch, 8, 8, 8] : float
  input target[batch] : class
  x = image |> conv(8, 3, pad=1) |> bn |> relu
  for i in range(3) {
    y = x |> conv(8, 3, pad=1) |> bn |> relu |> conv(8, 3, pad=1) |> bn
    x = x + y |> relu
  }
  logits = x |> flatten |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9)  precision = fp32 }
"""


@pytest.mark.parametrize(
    ("states_bytes", "fused"),
    [(0, False), (0, True), (1 << 40, True), pytest.param(1 << 40, False, marks=pytest.mark.exhaustive)],
)
def test_nor_does_any_in_depth_first_groups_or_with_states_on_the_host(states_bytes: int, fused: bool) -> None:
    tabulated = fused_table(graph(RESIDUAL), gpu=UNCLUSTERED)
    programs = Fusion.of(tabulated).programs() if fused else None
    every = choose(tabulated, {}, None, programs)
    host = tabulated.device.links
    for rows, part in itertools.product((2, 4), (0.7, 0.4, 0.0)):
        _, draft = divided_drafts(tabulated, Division(500, rows), programs)
        states = states_to_offload(tabulated.graph, draft, states_bytes, {Space.HOST: 1 << 40}, host)
        draft = offload_states(tabulated.graph, draft, states, host, 0.0) if states else draft
        groups = (*every.train, *every.infer)
        kept = choose_residency(RematTask(tabulated.graph, draft, host, BOTH, 1 << 60, groups=groups))
        result = choose_residency(
            RematTask(tabulated.graph, draft, host, BOTH, int(part * kept.live_bytes), groups=groups), work=WORK
        )
        assert 0 < result.least_bytes == kept.least_bytes <= result.live_bytes < kept.live_bytes


def test_nothing_is_searched_below(monkeypatch: pytest.MonkeyPatch) -> None:
    tabulated, draft = table("residual"), draft_of("residual")
    link = tabulated.device.links
    least_bytes = choose_residency(RematTask(tabulated.graph, draft, link, BOTH, 1 << 60)).least_bytes
    searched: list[int] = []

    def decide(available_bytes: int) -> Residency:
        return choose_residency(RematTask(tabulated.graph, draft, link, BOTH, available_bytes), work=WORK)

    monkeypatch.setattr(greedy, "cut_into_segments", lambda *_: searched.append(1))
    assert decide(least_bytes - 1).live_bytes >= least_bytes
    assert not searched
    decide(least_bytes)
    assert searched
