"""Plans of the search, changed at random as a bug in the search could change them: does the verifier notice?

There are 44 kinds of changes: offsets, waits, rows, order within and between launches, layouts, types, kernels,
settings, workspaces, aliases, spaces, streams; and what a plan says of its optimizer, metrics, GPU, precision, source,
graph and states. There are seven plans: fused, offloading, recomputing, divided into micro-batches, on concurrent
streams, of several mini-batches a step, and one made with the bundled profile.

A mutant passes in one of three ways. The verifier refuses it. Or the mutant runs in every order that streams and waits
allow, with the same bits as its plan, and its code can be generated. Or only a library on the GPU can judge the change,
and the verifier says so. Changes without effect on a plan are counted separately. Needs no GPU.

    python benchmarks/plan_mutants.py [--cases 22000] [--workers 16] [--seed 0] [--resume] [--shard 0/4]
"""

from __future__ import annotations

from record import start
from sharded import Verdict, asked, campaign, tell

from tests.plan.campaign import KINDS, PLANS, Outcome, outcome

WAYS = tuple((kind, name) for kind in KINDS for name in PLANS)


def judge(seed: int, number: int) -> Verdict:
    """Judge one mutant. The number selects the kind of change and the plan in turn."""
    kind, name = WAYS[number % len(WAYS)]
    drawn = seed * 1_000_000 + number // len(WAYS)
    what, why = outcome(name, kind, drawn)
    failure = f"{kind} of {name}, seed {drawn}: {why}" if what is Outcome.WRONG else ""
    counts = {} if what is Outcome.UNCHANGED else {"mutants": 1, f"{kind} {what.value}": 1}
    return Verdict(what.value, failure, counts)


def main() -> None:
    """Run the command line."""
    tell(campaign("plan_mutants", judge, asked(__doc__, 22_000)))


if __name__ == "__main__":
    start(main)
