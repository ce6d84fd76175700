"""The least live bytes of a small step under any recomputation, as an integer program.

Launches keep their order. Before each launch, any earlier ones run again in that order, as in the program of
"Checkmate" (Jain et al., 2020). A launch that changes a state runs once.
"""

from __future__ import annotations

from ortools.sat.python import cp_model

from mbc.hardware.streams import aligned
from mbc.ir.graph import TrainingGraph
from mbc.optimize.remat.optimizer_offload import persistent_bytes
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.in_place import in_place_operands, overwritten
from mbc.optimize.schedule.liveness import owners
from mbc.plan.model import Mode


def least_live_bytes(graph: TrainingGraph, draft: Draft, at_most_bytes: int) -> tuple[int, bool]:
    """Return a lower bound of the live bytes of any recomputation in a draft, and whether it is their optimum.

    Args:
        graph: The training graph.
        draft: The step that keeps every value, with a launch for each update.
        at_most_bytes: Live bytes of a solution.
    """
    model, launches, owner = cp_model.CpModel(), draft.train.launches, owners(draft.buffers)
    always = {owner[buffer] for buffer in draft.persistent}
    touched = [{owner[a.buffer] for a in launch.accesses} - always for launch in launches]
    written = [
        {owner[a.buffer] for a in launch.accesses if a.mode is Mode.WRITE} & here
        for launch, here in zip(launches, touched, strict=True)
    ]
    once = [
        any(a.mode is Mode.ACCUMULATE or (a.mode is Mode.WRITE and owner[a.buffer] in always) for a in launch.accesses)
        for launch in launches
    ]
    pairs = in_place_operands(graph, ())
    sizes = {buffer: aligned(draft.buffers[buffer].size_bytes) for here in touched for buffer in here}
    most_bytes = model.new_int_var(0, at_most_bytes - persistent_bytes(draft), "")
    # Whether a buffer is live before a launch of a stage. A stage ends with the first run of the launch of its number.
    live = {b: model.new_constant(b not in set().union(*written)) for b in sizes}
    for stage in range(len(launches)):
        for i in range(stage + 1):
            runs = model.new_constant(1) if i == stage else model.new_bool_var("")
            if i < stage and once[i]:
                continue
            after = {b: model.new_bool_var("") for b in sizes}
            now: list[cp_model.LinearExprT] = []
            for b, size_bytes in sizes.items():
                writes = runs if b in written[i] else 0
                model.add(after[b] <= live[b] + writes)
                if b in touched[i] - written[i]:
                    model.add(live[b] >= runs)
                there = model.new_bool_var("")
                model.add(there >= live[b])
                model.add(there >= writes)
                now.append(size_bytes * there)
            for old, new in ((owner[old], owner[new]) for old, new in overwritten(launches[i], draft.buffers, pairs)):
                if old in sizes and new in sizes and sizes[old] == sizes[new]:
                    shared = model.new_bool_var("")  # the output is written over the operand
                    model.add(shared + after[old] <= 1)
                    model.add(shared <= runs)
                    now.append(-sizes[new] * shared)
            model.add(sum(now) <= most_bytes)
            live = after
    model.minimize(most_bytes)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = 60
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
    return round(solver.best_objective_bound) + persistent_bytes(draft), status == cp_model.OPTIMAL
