"""The predicted times of a plan's programs."""

from __future__ import annotations

from collections.abc import Sequence

from mbc.ir.graph import Operation
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.schedule.simulate import measured_share
from mbc.optimize.search.prediction_interval import Timing, time_range_us
from mbc.plan.model import Buffer, PredictedTimes, Program

TimedProgram = tuple[Program, float]  # a program with its waits, and its time in us


def predicted_times(
    table: CandidateTable, buffers: Sequence[Buffer], train: TimedProgram, infer: TimedProgram
) -> PredictedTimes:
    """Return the times of both programs with their intervals, on the device of `table`.

    Args:
        table: Candidates of the graph.
        buffers: Buffers of both programs.
        train: The training program with its waits, and its time in us.
        infer: The inference program with its waits, and its time in us.
    """

    def figures(timed: TimedProgram, operations: Sequence[Operation]) -> tuple[float, float, float]:
        program, time_us = timed
        return time_us, *time_range_us(program, Timing.of(table, buffers, operations), table.device)

    graph = table.graph
    return PredictedTimes(*figures(train, graph.train), *figures(infer, graph.infer), measured_share(train[0]))
