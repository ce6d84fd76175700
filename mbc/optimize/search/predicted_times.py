"""The predicted times of a plan's programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mbc.ir.graph import Operation
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.schedule.contention import contention
from mbc.optimize.schedule.simulate import measured_share, simulate
from mbc.optimize.search.prediction_interval import time_range_us
from mbc.plan.model import Buffer, Program


class PredictedTimes(NamedTuple):
    """The first fields of `Predictions`, which says what they are."""

    train_us: float
    train_low_us: float
    train_high_us: float
    infer_us: float
    infer_low_us: float
    infer_high_us: float
    measured_share: float


def predicted_times(table: CandidateTable, buffers: Sequence[Buffer], train: Program, infer: Program) -> PredictedTimes:
    """Of programs with their waits, on the device of `table`."""

    def figures(program: Program, operations: Sequence[Operation]) -> tuple[float, float, float]:
        graph, device = table.graph, table.device
        time_us = simulate(program, contention=contention(program, graph, buffers, device))
        return time_us, *time_range_us(program, graph, buffers, device, table.larger, operations)

    return PredictedTimes(*figures(train, table.graph.train), *figures(infer, table.graph.infer), measured_share(train))
