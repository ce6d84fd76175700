"""Given micro-batches are kept by every convolution, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mbc.errors import MbcError
from mbc.hardware.spec import find_spec
from mbc.kernels.providers import PROVIDERS
from mbc.optimize import effort
from mbc.optimize.candidates.micro_batch import check_micro_batch
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.fusion.select_groups import Fusion
from mbc.optimize.search.search import Limits, search
from mbc.options import Policy
from mbc.plan.summary import summarise
from tests.graphs import training_graph

SOURCE = """
network pointwise(batch = 16, size = 7) {
  input image[batch, 3, size, size] : float
  input target[batch] : class
  x = image |> conv(64, 3, pad=1) |> bn |> relu |> conv(64, 1) |> bn |> relu |> conv(64, 1) |> bn |> relu
  logits = x |> global_avgpool |> linear(4)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
"""

MOST = effort.MAX_MICRO_BATCHES


def table(micro_batch: int, precision: str = "bf16", **settings: int) -> CandidateTable:
    asked = (("train.precision", precision), *((name, str(value)) for name, value in settings.items()))
    graph = training_graph(SOURCE, *asked)
    return CandidateTable(graph, find_spec("h200"), PROVIDERS, rules=Rules(micro_batch=micro_batch))


def test_groups_of_whole_batches_do_not_hide_convolutions():
    def with_convolutions(micro_batch: int) -> int:
        return sum(
            "convolution" in o.kind for group in Fusion.of(table(micro_batch)).all_groups for o in group.launches
        )

    assert with_convolutions(0) and with_convolutions(16)
    assert not with_convolutions(8)


def test_every_convolution_is_divided():
    plan = search(table(8), Limits(1 << 40))
    rows = {s.micro_batches for p in (plan.train, plan.infer) for s in summarise(plan, p) if "convol" in s.kind}
    assert rows == {(8, 8)}


@pytest.mark.parametrize(
    ("precision", "rows", "settings", "said", "remedy"),
    [
        ("fp32", 17, {}, "is more than the mini-batch of 16 rows", "give at most 16"),
        ("bf16", 4, {}, "cannot divide 'conv0' and 1 more: every micro-batch must", "give a multiple of 8"),
        ("bf16", 4, {"batch": 6}, "this operation needs multiples of 8 rows", "no division of 6 rows meets this"),
        ("fp32", 1, {"batch": 10**6}, "makes 1000000 calls of one convolution; at most 16384 are", "give at least 62"),
        ("fp32", 2, {}, "this operation needs multiples of 4 rows", "give a multiple of 4"),
    ],
)
def test_impossible_options_are_refused(precision: str, rows: int, settings: dict[str, int], said: str, remedy: str):
    with pytest.raises(MbcError) as refused:
        check_micro_batch(table(rows, precision, **settings))
    assert refused.value.code == "MBC205" and said in refused.value.message and remedy in refused.value.remedy


@pytest.mark.parametrize("policy", [Policy.POWER_OF_TWO, Policy.ALL])
@pytest.mark.parametrize(("batch", "least"), [(7, 1), (MOST, 1), (MOST + 1, None), (MOST + 2, 2), (2**30, 2**16)])
def test_the_search_does_not_grow_with_the_mini_batch(policy: Policy, batch: int, least: int | None):
    candidates = replace(table(0, "fp32", batch=batch, size=8), rules=Rules(policy))
    operation = next(o for o in candidates.graph.train if candidates.divisible(o))
    whole, *smaller = candidates.micro_batch_rows(operation)
    assert whole == batch and len(smaller) <= MOST
    assert (min(smaller) if smaller else None) == least
    assert policy is Policy.POWER_OF_TWO or len(smaller) == (batch // least - 1 if least else 0)
