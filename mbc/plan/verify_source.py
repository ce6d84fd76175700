"""The check of the source in a plan: parsed and lowered again, it must give the graph of the plan.

This check is not in `verify_plan`, which needs no parser; `mbc verify` calls both. Plans of tests and of other tools
may have no source; nothing is checked then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import NoReturn

from mbc.errors import MbcError
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.ir.graph import Operation, TrainingGraph, Value
from mbc.ops.shard import is_sharded
from mbc.options import Overrides
from mbc.passes.relu_bit_masks import mask_relus
from mbc.passes.training_step import differentiate
from mbc.plan.model import Plan
from mbc.source import Source
from mbc.version import __version__


def verify_source(plan: Plan) -> bool:
    """Return whether the plan has a source. Raise MBC139 unless that source gives the graph of the plan."""
    sources = _sources(plan.graph)
    if not sources:
        return False
    if len(sources) > 1:
        _fail(plan, f"has {len(sources)} sources: {', '.join(source.name for source in sources)}")
    try:
        graph = _graph_of(sources[0], plan)
    except MbcError as error:
        _fail(plan, f"has a source that does not compile: {error.message}")
    _compare(plan, graph)
    return True


def _sources(graph: TrainingGraph) -> list[Source]:
    spans = (item.span for item in (*graph.values.values(), *graph.train, *graph.infer))
    by_id = {id(span.source): span.source for span in spans if span is not None}
    return list(dict.fromkeys(by_id.values()))


def _graph_of(source: Source, plan: Plan) -> TrainingGraph:
    """Return the graph that a compilation of the source makes, with the plan's settings, ranks and bit masks."""
    graph = plan.graph
    of_rank = Overrides(batch=None if graph.ranks is None else graph.batch)
    lowered = lower(parse(source), plan.settings, graph.name, of_rank)
    sharded = is_sharded(graph)
    step = differentiate(lowered.network, lowered.optimizer, lowered.precision, graph.ranks, sharded)
    masked = {op.inputs[0] for op in graph.train if op.kind == "relu_mask"}
    return mask_relus(step, [op.name for op in step.train if not masked.isdisjoint(op.outputs)])


def _compare(plan: Plan, wanted: TrainingGraph) -> None:
    """Check that the graphs differ in nothing but their places in the source."""
    graph = plan.graph
    _compare_each(plan, "value", tuple(graph.values.values()), tuple(wanted.values.values()))
    _compare_each(plan, "operation of a step,", graph.train, wanted.train)
    _compare_each(plan, "operation of inference,", graph.infer, wanted.infer)
    for field in fields(TrainingGraph):
        if field.name in ("values", "train", "infer"):
            continue
        has, wants = getattr(graph, field.name), getattr(wanted, field.name)
        if has != wants:
            _fail(plan, f"does not follow from its source: its {field.name} is {has}, the source's is {wants}")


def _compare_each(
    plan: Plan, what: str, has: Sequence[Value] | Sequence[Operation], wanted: Sequence[Value] | Sequence[Operation]
) -> None:
    there, wants = {item.name: item for item in has}, {item.name: item for item in wanted}
    for name in (*there, *wants):
        if name not in there or name not in wants:
            where = "the plan" if name in there else "the source"
            _fail(plan, f"does not follow from its source: {what} '{name}' is in {where} only")
        if replace(there[name], span=None) != replace(wants[name], span=None):
            _fail(plan, f"does not follow from its source, which has another {what} '{name}'")
    if [*there] != [*wants] and isinstance(has[0], Operation):
        _fail(plan, f"does not follow from its source, which has each {what} in another order")


def _fail(plan: Plan, why: str) -> NoReturn:
    remedy = "compile the source again"
    if plan.version != __version__:
        remedy = f"verify it with mbc {plan.version}, which wrote it, or {remedy}"
    raise MbcError("MBC139", f"the plan of '{plan.graph.name}' {why}", remedy)
