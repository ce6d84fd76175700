"""Plans as the search makes them, changed at random as a bug in a search would change them: does the verifier notice?

33 kinds of changes (offsets, waits, rows, order within and between launches, layouts, types, kernels, settings,
workspaces, aliases, spaces, streams) of six plans: fused, offloading, recomputing, divided into micro-batches, on
concurrent streams, and one made with the bundled profile. Each mutant is refused, or runs in every order that streams
and waits allow, with the same bits as its plan, and becomes code; or it differs by what a library alone can judge on
the GPU, and the verifier says so. Changes that leave a plan as it is are not counted. Needs no GPU.

    python benchmarks/plan_mutants.py [--mutants 20000]
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from typing import Any

from record import show, start, write

from tests.plan.campaign import KINDS, PLANS, Outcome, outcome

SHOWN = [what for what in Outcome if what is not Outcome.UNCHANGED]


def campaign(mutants: int) -> tuple[dict[str, Counter[str]], list[dict[str, Any]]]:
    """Outcomes by kind, and every mutant that passed unexplained."""
    found = {kind: Counter[str]() for kind in KINDS}
    wrong: list[dict[str, Any]] = []
    made = 0
    for seed in itertools.count():
        for kind, name in itertools.product(KINDS, PLANS):
            what, why = outcome(name, kind, seed)
            if what is Outcome.UNCHANGED:
                continue
            made += 1
            found[kind][what.value] += 1
            if what is Outcome.WRONG:
                wrong.append({"plan": name, "kind": kind, "seed": seed, "why": why})
            if made == mutants:
                return found, wrong
    raise AssertionError("counting does not end")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--mutants", type=int, default=20_000)
    count = arguments.parse_args().mutants
    started = time.perf_counter()
    found, wrong = campaign(count)
    total = sum(found.values(), Counter[str]())
    rows = [{"name": kind, **{what.value: counts[what.value] for what in SHOWN}} for kind, counts in found.items()]
    seconds = round(time.perf_counter() - started)
    write("plan_mutants", rows, mutants=count, plans=list(PLANS), outcomes=dict(total), wrong=wrong, seconds=seconds)
    show(rows, ["name", *(what.value for what in SHOWN)])
    print(", ".join(f"{number:,} {what}" for what, number in total.items()))
    if wrong:
        raise SystemExit(f"{len(wrong)} mutants pass unexplained; the first: {wrong[0]}")


if __name__ == "__main__":
    start(main)
