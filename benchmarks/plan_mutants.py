"""Plans as the search makes them, changed at random as a bug in a search would change them: does the verifier notice?

44 kinds of changes: offsets, waits, rows, order within and between launches, layouts, types, kernels, settings,
workspaces, aliases, spaces, streams; and what a plan says of its optimizer, metrics, GPU, precision, source, graph and
states. Seven plans: fused, offloading, recomputing, divided into micro-batches, on concurrent streams, of several
mini-batches a step, and one made with the bundled profile. Each mutant is refused, or runs in every order that streams
and waits allow, with the same bits as its plan, and becomes code; or it differs by what a library alone can judge on
the GPU, and the verifier says so. Changes that leave a plan as it is are counted apart. Needs no GPU.

    python benchmarks/plan_mutants.py [--cases 22000] [--workers 16] [--seed 0] [--resume] [--shard 0/4]
"""

from __future__ import annotations

from record import start
from sharded import Verdict, asked, campaign, tell

from tests.plan.campaign import KINDS, PLANS, Outcome, outcome

WAYS = tuple((kind, name) for kind in KINDS for name in PLANS)


def judge(seed: int, number: int) -> Verdict:
    """Judge one mutant: of every kind of change and every plan in turn."""
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
