"""The plan of a solution: its programs with waits, its target, and its predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from mbc.hardware.spec import unlisted_sheet
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.search.limits import Limits
from mbc.optimize.search.predicted_times import predicted_times
from mbc.optimize.search.prediction_interval import Timing, similar_gpu
from mbc.optimize.search.solution import Solution
from mbc.options import UNLIMITED_BYTES
from mbc.plan.model import Bounds, Buffer, Kernel, Plan, Predictions, Program, Target
from mbc.version import __version__


def assemble_plan(solution: Solution, bounds: Bounds, overhead_bytes: int, limits: Limits) -> Plan:
    """Return the plan of a solution.

    Args:
        solution: The step and inference, with addresses.
        bounds: Lower bounds of all plans.
        overhead_bytes: Bytes that the GPU's context and libraries take.
        limits: Limits that the plan keeps.
    """
    table, draft, placed = solution.table, solution.draft, solution.placed
    device = table.device
    timed = solution.timed_train, solution.finished(draft.infer)
    (train, _), (infer, _) = timed
    pinned = any(key == "engine" and value >= 0 for p in (train, infer) for key, value in _settings(p))
    cudnn = table.profile.cudnn if pinned and table.profile else 0
    origin = _origin(table, draft.buffers, train, infer)
    size = device.architecture, device.multiprocessors, device.memory_bytes
    target = Target(device.name, *size, cudnn, origin, unlisted_sheet(device))
    predictions = Predictions(
        **asdict(predicted_times(table, draft.buffers, *timed)), arena_bytes=placed.arena_bytes,
        overhead_bytes=overhead_bytes, overhead_measured=device.overhead_bytes > 0,
        host_bytes=placed.host_bytes, peer_bytes=placed.peer_bytes,
    )  # fmt: skip
    host_bytes = limits.host_bytes if limits.host_bytes < UNLIMITED_BYTES else None
    programs = draft.buffers, placed.offsets, train, infer
    return Plan(
        __version__, table.graph, target, limits.budget_bytes, *programs, predictions, bounds, host_bytes,
        limits.peer_bytes,
    )  # fmt: skip


def _origin(table: CandidateTable, buffers: Sequence[Buffer], train: Program, infer: Program) -> str:
    """Return the origin of the times of both programs; empty if all are modelled."""
    if table.profile is None:
        return ""
    scaled_from = similar_gpu(train, Timing.of(table, buffers, table.graph.train)) or similar_gpu(
        infer, Timing.of(table, buffers, table.graph.infer)
    )
    return f"{table.profile.origin}{f'; some times are scaled from {scaled_from}' if scaled_from else ''}"


def _settings(program: Program) -> list[tuple[str, int]]:
    return [pair for launch in program.launches if isinstance(launch.work, Kernel) for pair in launch.work.settings]
