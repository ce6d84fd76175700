"""Plans for tests of reports: a network without a limit, and within budgets that need recomputation and offloading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from mbc.compiler import compile_plan, compile_plans
from mbc.options import Options, RankGpu
from mbc.plan.model import Plan
from mbc.source import Source
from tests.runtime.nets import small_plan

CHAIN = """network chain(batch = 64) {
  input image[batch, 3, 64, 64] : float
  input target[batch] : class
  x = image |> conv(32, 3, pad=1) |> bn |> relu
  for i in range(6) { x = x |> conv(32, 3, pad=1) |> bn |> relu }
  logits = x |> global_avgpool |> linear(10)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
"""


@cache
def chain_plan(share: float = 0.0) -> Plan:
    """Return the plan within a share of the arena of the plan without a limit; 0: no limit."""
    settings: tuple[tuple[str, str], ...] = ()
    if share:
        whole = chain_plan().predictions
        settings = (("memory.device", f"{int(whole.overhead_bytes + share * whole.arena_bytes)} B"),)
    return compile_plan(Source("chain.mbc", CHAIN), Options(gpu="h200", settings=settings))


@cache
def plans_of_unlike_gpus() -> tuple[Plan, Plan]:
    """Return the plans of two ranks that share a mini-batch, each on a GPU of its own kind."""
    one, other = compile_plans(Source("chain.mbc", CHAIN), Options(gpus=2, rank_gpus=(RankGpu("h200"), RankGpu("t4"))))
    return one, other


PLANS: Mapping[str, Callable[[], Plan]] = {
    "small": small_plan,
    "kept": chain_plan,
    "recomputed": lambda: chain_plan(0.75),
    "offloaded": lambda: chain_plan(0.4),
}
