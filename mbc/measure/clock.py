"""Times of calls in a captured graph, one after another, on a busy GPU, as in a training step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mbc.measure.gpu import Gpu, Graph

LONG_US = 1000.0  # a call of at least this time is alone in its graph
SHORTEST_GRAPH_US = 200.0  # in shorter graphs the launch of the graph would distort the times
LONGEST_GRAPH_US = 1000.0  # in longer graphs the cache makes hardly any difference
LONG_GRAPH_US = 800.0
MOST_CALLS = 64  # in one graph
LEAST_REPLAYS, LEAST_LONG_REPLAYS, MOST_REPLAYS = 5, 3, 100  # "long": graphs that take at least LONG_GRAPH_US
GAP_CALLS = (64, 512)  # nodes of the two graphs whose difference gives the time of one node

Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Times:
    """Time of one call: the median, and the distance between the quartiles."""

    median_us: float
    spread_us: float


class Clock:
    """Measures the time of calls on one GPU."""

    def __init__(self, gpu: Gpu) -> None:
        """Use the stream of `gpu` for all timings."""
        self._gpu = gpu

    def once_us(self, call: Work) -> float:
        """Return the time of one call in a graph, in microseconds.

        Raises:
            MbcError: MBC077, the call cannot be captured.
        """
        graph = Graph(self._gpu, call)
        try:
            first_us = self._gpu.times_us(graph.launch, 1)[0]
            # The first launch of a graph also sends it to the GPU, which takes long compared with a short kernel.
            return first_us if first_us > LONG_US else self._gpu.times_us(graph.launch, 1)[0]
        finally:
            graph.close()

    def times(self, calls: Sequence[Work], once_us: float, budget_us: float) -> Times:
        """Measure the time of calls that use different operands in turn, by replaying a graph of several calls.

        Args:
            calls: The same operation on different operands.
            once_us: Approximate time of one call.
            budget_us: Approximate time of all replays together.

        Returns:
            Median and spread of the time of one call.
        """
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
        """Return the time that each further node adds to a graph; `call` is a kernel that does almost nothing."""

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
    """Return the number of calls in a graph.

    Each of the `sets` operand sets is used once if the graph is then not too long, and several times if it is too
    short.
    """
    most = max(1, min(MOST_CALLS, int(LONGEST_GRAPH_US / max(once_us, 1e-3))))
    return min(most, max(sets, math.ceil(SHORTEST_GRAPH_US / max(once_us, 1e-3))))
