"""Times of calls as a step runs them: inside a captured graph, one after another, on a GPU under load."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mbc.measure.gpu import Gpu, Graph

LONG_US = 1000.0  # a call of which one a graph is enough
SHORTEST_GRAPH_US = 200.0  # below that the launch of a graph would show in the times
LONGEST_GRAPH_US = 1000.0  # where operands from memory instead of the cache make no difference to speak of
LONG_GRAPH_US = 800.0
MOST_CALLS = 64  # in one graph
LEAST_REPLAYS, LEAST_LONG_REPLAYS, MOST_REPLAYS = 5, 3, 100  # long: of graphs that take LONG_GRAPH_US
GAP_CALLS = (64, 512)  # nodes of the two graphs whose difference tells the time of one

Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Times:
    """Median and distance between the quartiles, of one call."""

    median_us: float
    spread_us: float


class Clock:
    """Times calls on one GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def once_us(self, call: Work) -> float:
        """One call in a graph. MBC077 where it cannot be captured."""
        graph = Graph(self._gpu, call)
        try:
            first_us = self._gpu.times_us(graph.launch, 1)[0]
            # The first launch of a graph also sends it to the GPU, which counts beside a short kernel.
            return first_us if first_us > LONG_US else self._gpu.times_us(graph.launch, 1)[0]
        finally:
            graph.close()

    def times(self, calls: Sequence[Work], once_us: float, budget_us: float) -> Times:
        """Of calls on different operands in turn: graphs of enough of them, replayed for about `budget_us`."""
        count = calls_per_graph(len(calls), once_us)

        def body() -> None:
            for number in range(count):
                calls[number % len(calls)]()

        graph = Graph(self._gpu, body)
        try:
            graph_us = once_us * count
            least = LEAST_LONG_REPLAYS if graph_us >= LONG_GRAPH_US else LEAST_REPLAYS
            replays = max(least, min(MOST_REPLAYS, round(budget_us / max(graph_us, 1.0))))
            if once_us < LONG_US:
                graph.launch()
            taken = sorted(t / count for t in self._gpu.times_us(graph.launch, replays))
        finally:
            graph.close()
        low, _, high = statistics.quantiles(taken, n=4)
        return Times(statistics.median(taken), high - low)

    def gap_us(self, call: Work) -> float:
        """From one node of a graph to the next: what each more costs, `call` being one kernel with nothing to do."""

        def graph_us(count: int) -> float:
            def body() -> None:
                for _ in range(count):
                    call()

            graph = Graph(self._gpu, body)
            try:
                graph.launch()
                return min(self._gpu.times_us(graph.launch, LEAST_REPLAYS))
            finally:
                graph.close()

        few, many = GAP_CALLS
        return (graph_us(many) - graph_us(few)) / (many - few)


def calls_per_graph(sets: int, once_us: float) -> int:
    """All sets of operands where that is not too long; more than once round where that is too short."""
    most = max(1, min(MOST_CALLS, int(LONGEST_GRAPH_US / max(once_us, 1e-3))))
    return min(most, max(sets, math.ceil(SHORTEST_GRAPH_US / max(once_us, 1e-3))))
