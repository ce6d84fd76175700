"""Answers of a table of candidates by the number of a request, so that equal requests are compared once."""

from __future__ import annotations

from dataclasses import dataclass, field

from mbc.kernels.base import Candidate, Request
from mbc.optimize.candidates.fronts import ParetoFronts
from mbc.optimize.candidates.scaled_times import RematKernels

RequestKey = tuple[Request, RematKernels]
OperationNames = tuple[str, tuple[str, ...]]  # of an operation and its outputs


@dataclass
class NumberedAnswers:
    """Answers of one table for the whole mini-batch.

    A deep network asks many times for few distinct requests, which take long to compare. So each request has a number.

    Attributes:
        requests: Numbers of the requests.
        numbers: The number of each operation's request, by the names of the operation and its outputs.
        offered: Answers of `CandidateTable.offered`, by number.
        modelled: Answers of `CandidateTable.modelled`, by number.
        is_profiled: Answers of `CandidateTable.has_profiled_time`, by number.
        compares_estimate: Answers of `CandidateTable.compares_estimate`, by number.
        fronts: Answers of `CandidateTable.fronts`, by number, and by names where the user chose a layout.
    """

    requests: dict[RequestKey, int] = field(default_factory=dict[RequestKey, int])
    numbers: dict[OperationNames, int] = field(default_factory=dict[OperationNames, int])
    offered: dict[int, tuple[Candidate, ...]] = field(default_factory=dict[int, tuple[Candidate, ...]])
    modelled: dict[int, tuple[Candidate, ...]] = field(default_factory=dict[int, tuple[Candidate, ...]])
    is_profiled: dict[int, bool] = field(default_factory=dict[int, bool])
    compares_estimate: dict[int, bool] = field(default_factory=dict[int, bool])
    fronts: dict[int | OperationNames, ParetoFronts] = field(default_factory=dict[int | OperationNames, ParetoFronts])
