"""Infeasible budgets (MBC203, MBC204): why no plan of a network fits, and what would lower the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mbc.errors import BudgetError
from mbc.hardware.spec import DeviceSpec
from mbc.hardware.streams import aligned
from mbc.ir.graph import TrainingGraph
from mbc.ir.types import Precision
from mbc.ops import KINDS
from mbc.optimize import effort
from mbc.optimize.bounds.arena_bytes import LeastArena, bytes_of_states
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.plan.model import Plan
from mbc.plan.techniques import saves_memory
from mbc.units import show_distinct, show_enough, show_size

_RAISE = "raise memory.device to "
_WIDE = frozenset({Precision.FP32, Precision.TF32})


def cannot_fit(
    table: CandidateTable, least: LeastArena, techniques: AllowedTechniques, overhead_bytes: int, budget_bytes: int
) -> BudgetError:
    """Return error MBC203 for operands that take more than the budget, together with the overhead.

    Args:
        table: Candidates of the step.
        least: The lower bound of the arena.
        techniques: Techniques that may be used.
        overhead_bytes: Bytes that the GPU's context and libraries take.
        budget_bytes: The budget, with the overhead.
    """
    graph, floor, operation = table.graph, least.total_bytes, least.operation
    available_bytes, outside_bytes = budget_bytes - overhead_bytes, techniques.outside_bytes
    movable_bytes = bytes_of_states(graph, of_optimizer=True)
    states_bytes = bytes_of_states(graph) - min(movable_bytes, outside_bytes)
    rows = _most_rows(table, available_bytes - states_bytes, techniques.split)
    operands = (graph.values[name] for name in dict.fromkeys((*operation.inputs, *operation.outputs)))
    activations_bytes = sum(value.type.size_bytes for value in operands if value.per_sample)
    # Half of the activations closes half of the gap.
    halves = available_bytes > 0 and activations_bytes >= floor - available_bytes
    half_precision = _half_precision(graph, table.device) if halves else ""
    remedies = [_smaller_batch(graph, rows, "at most")] if 0 < rows < graph.batch else []
    if half_precision:
        remedies.append(_set_precision(half_precision))
    if available_bytes > 0 and movable_bytes > outside_bytes:
        movable = show_enough(movable_bytes)
        remedies.append(f"let {movable} of the optimizer's states be in host memory (memory.host, offload)")
    remedies.append(_above(floor + overhead_bytes))
    reserved, budget = show_distinct(overhead_bytes, budget_bytes)
    reason = f"{reserved} are reserved for the GPU's context and libraries, before any tensor"
    if available_bytes > 0:
        needed, budget = show_distinct(floor + overhead_bytes, budget_bytes)
        reason = (
            f"the lower bound of all plans is {needed}, set by '{operation.name}' ({operation.kind}): "
            f"{show_size(floor)} of its operands, its workspace and the states, and {show_size(overhead_bytes)} "
            "reserved for the GPU's context and libraries"
        )
    return BudgetError(
        "MBC203",
        f"'{graph.name}' cannot fit {budget}: {reason}",
        _any_of(remedies),
        operation.span if available_bytes > 0 else None,
        needed_bytes=floor + overhead_bytes,
        floor_bytes=floor + overhead_bytes,
        budget_bytes=budget_bytes,
        at_any_batch=available_bytes <= 0,
        half_precision=half_precision,
    )


def cannot_start(table: CandidateTable, least: LeastArena, overhead_bytes: int, budget_bytes: int) -> BudgetError:
    """Return error MBC203 for states and inputs that take more than the budget, together with the overhead.

    Args:
        table: Candidates of the step.
        least: The lower bound of the arena.
        overhead_bytes: Bytes that the GPU's context and libraries take.
        budget_bytes: The budget, with the overhead.
    """
    graph, start_bytes = table.graph, least.start_bytes
    inputs_bytes = sum(aligned(graph.values[name].type.size_bytes) for name in graph.inputs)
    rows = (budget_bytes - overhead_bytes - start_bytes + inputs_bytes) * graph.batch // inputs_bytes
    needed, budget = show_distinct(start_bytes + overhead_bytes, budget_bytes)
    remedies = [_smaller_batch(graph, rows, "at most")] if 0 < rows < graph.batch else []
    return BudgetError(
        "MBC203",
        f"'{graph.name}' cannot fit {budget}: the lower bound of all plans is {needed}: {show_size(start_bytes)} of "
        f"states and inputs when a step starts, and {show_size(overhead_bytes)} reserved for the GPU's context and "
        "libraries",
        _any_of([*remedies, _above(start_bytes + overhead_bytes)]),
        needed_bytes=start_bytes + overhead_bytes,
        floor_bytes=start_bytes + overhead_bytes,
        budget_bytes=budget_bytes,
    )


def is_hopeless(arena_bytes: int, available_bytes: int) -> bool:
    """Return whether the smallest step of one kind is so large that steps of other kinds cannot fit, either."""
    return arena_bytes > effort.HOPELESS_ARENA * available_bytes


def not_found(smallest: Plan, floor: int, budget_bytes: int) -> BudgetError:
    """Return error MBC204, which recommends the size of the smallest verified plan as a budget.

    Args:
        smallest: The verified plan that takes least.
        floor: The lower bound of all plans in bytes, with the overhead.
        budget_bytes: The budget, with the overhead.
    """
    graph, device, predictions = smallest.graph, smallest.target.device, smallest.predictions
    arena_bytes, overhead_bytes = predictions.arena_bytes, predictions.overhead_bytes
    needed_bytes = arena_bytes + overhead_bytes
    needed, budget = show_distinct(needed_bytes, budget_bytes)
    available_bytes, fixed_bytes = budget_bytes - overhead_bytes, _fixed_bytes(smallest)
    activations_bytes = max(1, arena_bytes - fixed_bytes)
    # The arena is nearly affine in the rows of the mini-batch, unless the step saves memory: a smaller batch leaves
    # less to recompute, to offload and to divide.
    qualifier = "at most about" if saves_memory(smallest) else "about"
    rows = (available_bytes - fixed_bytes) * graph.batch // activations_bytes
    # Half of the activations closes half of the gap.
    half_precision = _half_precision(graph, device) if activations_bytes >= arena_bytes - available_bytes else ""
    remedies = [_smaller_batch(graph, rows, qualifier)] if graph.batch > 1 else []
    if half_precision:
        remedies.append(_set_precision(half_precision))
    remedies.append(f"{_RAISE}{show_enough(needed_bytes)}; a smaller budget may work: each budget is searched anew")
    return BudgetError(
        "MBC204",
        f"the smallest plan found for '{graph.name}' takes {needed}: its arena {show_size(arena_bytes)}, "
        f"and {show_size(overhead_bytes)} outside it; the budget is {budget}",
        _any_of(remedies),
        needed_bytes=needed_bytes,
        floor_bytes=floor,
        budget_bytes=budget_bytes,
        half_precision=half_precision,
    )


def recommending(refusal: BudgetError, budget_bytes: int) -> BudgetError:
    """Return error MBC204 with another recommended budget."""
    recommended, accepted = (_RAISE + show_enough(size) for size in (refusal.needed_bytes, budget_bytes))
    return replace(refusal, remedy=refusal.remedy.replace(recommended, accepted), needed_bytes=budget_bytes)


def _half_precision(graph: TrainingGraph, device: DeviceSpec) -> str:
    """Return the precision in which activations take half of their bytes on the GPU; empty for a graph of 16 bits."""
    return ("bf16" if device.has_bf16_and_tf32 else "fp16") if graph.precision in _WIDE else ""


def _any_of(remedies: Sequence[str]) -> str:
    return remedies[0] if len(remedies) == 1 else f"{', '.join(remedies[:-1])}, or {remedies[-1]}"


def _smaller_batch(graph: TrainingGraph, rows: int, qualifier: str) -> str:
    """Return the remedy of a smaller batch. Where some rows fit, it names that number for the batch of all GPUs.

    Args:
        graph: The graph of one rank.
        rows: Rows of this rank that fit; below 1 if there is no such number.
        qualifier: How exact the number is, such as `at most`.
    """
    if graph.ranks is not None:
        rows = min(rows * graph.ranks.size, graph.global_batch - 1)
    return f"lower the batch (`mbc fit` finds the largest that fits{f', {qualifier} {rows}' if rows > 0 else ''})"


def _set_precision(precision: str) -> str:
    return f"set train.precision to {precision} (activations take half of their bytes)"


def _fixed_bytes(plan: Plan) -> int:
    """Return the bytes of the arena that do not depend on the batch: states and the largest gradient of a parameter."""
    graph, predictions = plan.graph, plan.predictions
    outside_bytes = min(predictions.host_bytes + predictions.peer_bytes, bytes_of_states(graph, of_optimizer=True))
    gradients = (v for v in graph.values.values() if not v.per_sample and not v.role.persistent)
    largest_bytes = max((aligned(v.type.size_bytes) for v in gradients), default=0)
    return bytes_of_states(graph) - outside_bytes + largest_bytes


def _above(bound_bytes: int) -> str:
    return f"raise memory.device above {show_enough(bound_bytes)}, a lower bound: most plans take more"


def _most_rows(table: CandidateTable, available_bytes: int, split: bool) -> int:
    """Return the largest batch at which the operands of every operation fit; below 1 where no batch fits.

    Workspaces do not count.
    """
    graph = table.graph
    most = graph.batch
    for operation in (*graph.train, *graph.infer):
        kind = KINDS[operation.kind]
        if kind.view or (split and kind.divisible):
            continue
        shared = {output for output, _ in (*kind.updates, *kind.in_place)}
        names = dict.fromkeys(operation.inputs)
        names |= dict.fromkeys(name for i, name in enumerate(operation.outputs) if i not in shared)
        values = [graph.values[name] for name in names if not graph.values[name].role.persistent]
        by_rows = sum(v.type.size_bytes for v in values if v.per_sample)
        others = sum(v.type.size_bytes for v in values if not v.per_sample)
        if by_rows:
            most = min(most, (available_bytes - others) * graph.batch // by_rows)
    return most
