"""Random networks in the language, which are planned without a limit and at four budgets, verified, and stepped.

Each network (`drawn_networks.py`), along one to three spatial axes, is planned for a GPU without a limit, at three
budgets between the lower bound of all plans and the memory of that plan, and at the budgets that the refusals of the
lower bound and of one byte less recommend. Each network is checked for these properties:

* The compiler's verifier accepts every plan, also when the plan is read from its file, and its source gives its graph.
* A recommended budget has a plan. No plan takes less than the lower bound that a refusal names.
* Loss, outputs, gradients (as optimizer states), parameters, moving averages and statistics of two steps are as near to
  float64 as rounding allows (`mbc.equivalence.rule`): at most twice as far as those of the undivided step, plus a
  floor.

    python benchmarks/planned_networks.py [--cases 2000] [--workers 16] [--seed 0] [--resume] [--shard 0/4]
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from drawn_networks import Drawn, drawn_network
from record import start
from sharded import Verdict, asked, campaign, tell

from mbc.compiler import compile_plan
from mbc.equivalence.rule import Draw, Reference, compare
from mbc.equivalence.run_step import Outcome, Part, random_inputs
from mbc.errors import BudgetError, MbcError
from mbc.ir.graph import Role, TrainingGraph
from mbc.ir.types import Precision
from mbc.options import Measure, Options, Policy
from mbc.plan.file import dump_plan, load_plan
from mbc.plan.model import Plan
from mbc.plan.summary import summarise
from mbc.plan.verify import verify_plan
from mbc.plan.verify_source import verify_source
from mbc.runtime.module import Module
from mbc.source import Source
from mbc.units import parse_size

SHARES = (0.6, 0.3, 0.1)  # of the range from the lower bound to the plan without a limit
AXES = (2, 3, 2, 1)  # spatial axes of the networks, in turn
STEPS = 2
RATE = 1e-3
OF_SOURCES = ("MBC042", "MBC051")  # of networks that the language refuses: every parameter is frozen


@dataclass
class Planned:
    """Plans of one network by their purpose, and the lower bounds that refusals named."""

    plans: dict[str, Plan] = field(default_factory=dict[str, Plan])
    refused_bytes: list[int] = field(default_factory=list[int])
    counts: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])


def judge(seed: int, number: int, most_layers: int = 5) -> Verdict:
    """Plan and step one network."""
    drawn = drawn_network(random.Random(f"{seed} {number}"), most_layers, AXES[number % len(AXES)])
    source = Source("drawn.mbc", drawn.source)
    base = Options(drawn.gpu, (("train.precision", drawn.precision),), measure=Measure.NEVER)
    try:
        result = planned(source, base)
    except MbcError as error:
        if error.code in OF_SOURCES:
            return Verdict("nothing to train")
        return Verdict(error.code, f"{error}\n{drawn.gpu} {drawn.precision}\n{drawn.source}")
    result.wrong += checked(result)
    if not result.wrong and drawn.precision != Precision.FP16.value:
        result.wrong += stepped(source, base, drawn, result, number)
    for name, plan in result.plans.items():
        result.counts[f"plans {name}"] += 1
        result.counts["plans that recompute, offload or divide"] += _saves(plan)
    if result.wrong:
        return Verdict("wrong", f"{result.wrong[0]}\n{drawn.gpu} {drawn.precision}\n{drawn.source}", result.counts)
    return Verdict("right", "", result.counts)


def planned(source: Source, base: Options) -> Planned:
    """Return the plans without a limit and at the five budgets.

    Raises:
        MbcError: A plan was refused for another reason than a budget that is too small.
    """
    result = Planned()
    free = result.plans["without a limit"] = compile_plan(source, base)
    most, least = needed_bytes(free), free.bounds.floor_bytes + free.predictions.overhead_bytes
    for share in SHARES:
        _plan(source, base, int(least + share * (most - least)), f"at {share:.0%}", result)
    refused = _plan(source, base, least, "at the lower bound", result)
    if refused is not None and _plan(source, base, refused.needed_bytes, "at a recommended budget", result):
        result.wrong.append(f"a recommended budget of {refused.needed_bytes} B is refused")
    below = _plan(source, base, least - 1, "below the lower bound", result)
    if below is None:
        result.wrong.append("a budget below the lower bound has a plan")
    enough = None if below is None else re.search(r"; a plan that saves no memory fits (\S+)", below.remedy)
    if below is not None and (
        enough is None or _plan(source, base, parse_size(enough[1]), "at the size beside a lower bound", result)
    ):
        result.wrong.append("a refusal below the lower bound names no size that has a plan")
    return result


def _plan(source: Source, base: Options, budget_bytes: int, title: str, result: Planned) -> BudgetError | None:
    options = replace(base, settings=(*base.settings, ("memory.device", f"{budget_bytes} B")))
    try:
        result.plans[title] = compile_plan(source, options)
    except BudgetError as refused:
        result.refused_bytes.append(refused.floor_bytes)
        result.counts[f"{refused.code} {title}"] += 1
        return refused
    return None


def needed_bytes(plan: Plan) -> int:
    """Return the bytes of GPU memory that the plan needs."""
    return plan.predictions.arena_bytes + plan.predictions.overhead_bytes


def checked(result: Planned) -> list[str]:
    """Return the faults of the plans."""
    wrong: list[str] = []
    for name, plan in result.plans.items():
        try:
            again = load_plan(dump_plan(plan), "plan.json")
            verify_plan(again)
            if not verify_source(again):
                wrong.append(f"the plan {name} has no source")
        except MbcError as error:
            wrong.append(f"the plan {name} read again: {error}")
        bound_bytes = plan.bounds.floor_bytes + plan.predictions.overhead_bytes
        if bound_bytes < max(result.refused_bytes, default=0):
            wrong.append(f"the plan {name} prints a lower bound of {bound_bytes}, refusals {max(result.refused_bytes)}")
        if plan.predictions.arena_bytes < plan.bounds.floor_bytes:
            wrong.append(f"the plan {name} is below its lower bound")
    return wrong


def stepped(source: Source, base: Options, drawn: Drawn, result: Planned, number: int) -> list[str]:
    """Return the faults of the plans' steps."""
    whole = replace(base, policy=Policy.UNDIVIDED)
    undivided = compile_plan(source, whole)
    exact = compile_plan(source, replace(whole, settings=(("train.precision", "fp64"),)))
    precision, earlier = Precision(drawn.precision), dict[tuple[str, int], Outcome]()

    def run(name: str, plan: Plan, draw: int) -> Outcome:
        if (name, draw) not in earlier:
            earlier[name, draw] = outcome(plan, inputs_of(undivided.graph, number, draw))
        return earlier[name, draw]

    def drawing(name: str, plan: Plan, draw: int) -> Draw:
        return Draw(run(name, plan, draw), run("undivided", undivided, draw), run("fp64", exact, draw))

    wrong: list[str] = []
    for name, plan in result.plans.items():
        divided = sum(len(summary.micro_batches) > 1 for summary in summarise(plan, plan.train))
        try:
            compared = compare(partial(drawing, name, plan), Reference.FLOAT64, precision, operations=max(1, divided))
        except MbcError as error:
            if error.code not in ("MBC197", "MBC198"):
                wrong.append(f"the step of the plan {name}: {error}")
            result.counts["steps of nothing but rounding"] += 1
            continue
        result.counts["steps compared"] += 1
        wrong += [
            f"{c.part} {c.name} of the plan {name} is off by {c.error:.2g}, allowed are {c.limit:.2g}"
            for c in compared
            if not c.passed
        ]
    return wrong


def inputs_of(graph: TrainingGraph, number: int, draw: int) -> Sequence[Mapping[str, Any]]:
    """Return the inputs of each mini-batch of STEPS steps, by name."""
    each = [random_inputs(graph, number, draw * 1000 + part) for part in range(STEPS * graph.optimizer.accumulate)]
    count = graph.optimizer.accumulate
    return [
        {name: np.concatenate([one[name] for one in each[step * count : (step + 1) * count]]) for name in graph.inputs}
        for step in range(STEPS)
    ]


def outcome(plan: Plan, inputs: Sequence[Mapping[str, Any]]) -> Outcome:
    """Return all results of STEPS steps and one inference pass."""
    graph = plan.graph
    with Module(plan, seed=1, device="cpu") as net:
        tensors: dict[tuple[Part, str], Any] = {}
        for number, step in enumerate(inputs):
            loss = float(net.step(lr=RATE, **step))
            tensors[Part.LOSS, f"loss {number}"] = np.float64(loss).reshape(1)
        first = {name: inputs[0][name][: graph.batch] for name in graph.infer_inputs}
        outputs = net.forward(*first.values())
        arrays = outputs if isinstance(outputs, tuple) else (outputs,)
        tensors |= {(Part.OUTPUT, name): array for name, array in zip(graph.outputs, arrays, strict=True)}
        for state in graph.states:
            role = graph.values[state.value].role
            if role in (Role.PARAMETER, Role.OPTIMIZER, Role.STATISTIC):
                part = Part.STATISTIC if role is Role.STATISTIC else Part.GRADIENT
                tensors[part, state.value] = np.array(net.state(state.value))
    return Outcome("cpu", 1, tensors)


def _saves(plan: Plan) -> bool:
    names = [launch.operations for launch in plan.train.launches]
    return len(names) > len({*names})


def main() -> None:
    """Run the command line."""
    tell(campaign("planned_networks", judge, asked(__doc__, 2000), chunk=4))


if __name__ == "__main__":
    start(main)
