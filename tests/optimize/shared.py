"""Tables, drafts and plans of ranks that share a mini-batch, for tests of where gradients are summed."""

from __future__ import annotations

import functools
from pathlib import Path

from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.ir.ranks import share_rows
from mbc.kernels.providers import PROVIDERS
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.fusion.select_groups import Fusion
from mbc.optimize.schedule.emit_launches import Draft, emit_launches
from mbc.optimize.search.search import Limits, search
from mbc.optimize.selection.select import Choices, choose
from mbc.passes.training_step import differentiate
from mbc.plan.collectives import is_bucket
from mbc.plan.model import Plan
from mbc.profile.model import calibrated, for_ranks
from mbc.source import Source
from tests.optimize.planned import H200, NETWORKS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = {
    "digits": ("01_digits/net.mbc", ()),
    "resnet": ("resnet.mbc", (("size", "64"), ("width", "16"), ("classes", "10"))),
    "vgg": ("vgg16.mbc", (("size", "32"), ("width", "16"), ("classes", "10"))),
}


@functools.cache
def shared_table(network: str, precision: str = "bf16", rules: Rules = Rules()) -> CandidateTable:  # noqa: B008
    """Return candidates of the two ranks of a small example, or of NETWORKS, with estimated times."""
    if network in NETWORKS:
        source, sets = Source(f"{network}.mbc", NETWORKS[network]), ()
    else:
        path, sets = SMALL[network]
        source = Source(path, (EXAMPLES / path).read_text(encoding="utf-8"))
    program = parse(source)
    sets = (*sets, ("train.precision", precision))
    (ranks,) = share_rows(lower(program, sets, None).network.batch // 2 * 2, 2)
    lowered = lower(program, (*sets, ("batch", str(ranks.rows[0]))), None)
    graph = differentiate(lowered.network, lowered.optimizer, lowered.precision, ranks)
    return CandidateTable(graph, for_ranks(calibrated(H200, None), None, 2), PROVIDERS, None, rules)


@functools.cache
def chosen(network: str, precision: str = "bf16") -> Choices:
    table = shared_table(network, precision)
    return choose(table, {}, programs=Fusion.of(table).programs())


@functools.cache
def one_by_one(network: str, precision: str = "bf16") -> Draft:
    """Return a draft that keeps every value, with a launch for the sum of each gradient."""
    return emit_launches(shared_table(network, precision), chosen(network, precision))


@functools.cache
def kept(network: str, precision: str = "bf16") -> Plan:
    """Return the plan of a network without a limit of memory."""
    return search(shared_table(network, precision), Limits(1 << 40, without=frozenset({"concurrent_stream"})))


def sums_of(plan_or_draft: Plan | Draft) -> list[tuple[str, ...]]:
    """Return the gradients of each bucket, in order."""
    return [launch.operations for launch in plan_or_draft.train.launches if is_bucket(launch)]
