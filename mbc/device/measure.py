"""Measuring: which convolution engines of cuDNN compute a request rightly, and how fast.

Each candidate is captured into a CUDA graph, as a step will run it, replayed over operands that do not fit the L2
cache together where their sizes allow, compared with float64, and timed as the median of replays.
"""

from __future__ import annotations

import datetime
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mbc.device.cudnn import (
    CONVOLUTION_KINDS,
    Configuration,
    ConvolutionGraph,
    ConvolutionPlan,
    CudnnRefusal,
    engine_types,
    refusal,
)
from mbc.device.gpu import DoesNotFit, Gpu, Graph
from mbc.device.profile import Identity, Measurement, signature
from mbc.device.profile_file import ProfileWriter
from mbc.device.trial import TOLERANCES, Floats, Trial, Trials, checked_rows, distance, is_filter
from mbc.errors import MbcError
from mbc.ir.types import DType, Layout, TensorType, layout_matters
from mbc.kernels.base import LAYOUT_CODES, Request
from mbc.plan.model import ALIGNMENT_BYTES
from mbc.runtime.formats import loaded, stored_bytes

PROVIDER = "cudnn"  # mbc/kernels/cudnn_convolution.py is the provider that runs what is measured here
BEST_PER_LAYOUT = 8  # of the heuristics' order
MOST_COPIES = 8  # of the operands that a graph goes through in turn
COPIES_SHARE = 0.5  # of the memory that is left
SHORTEST_GRAPH_US = 200.0  # below that the launch of a graph would show in the times
MOST_CALLS = 64  # in one graph
TIMED_US = 6000.0  # of replays of one candidate
HOPELESS = 3.0  # times the best of its layout: timed once and no more
GUARD_BYTES = 256
GUARD = 0x5A


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run of `measure` did. `left` requests were not reached in the time allowed."""

    measured: int
    known: int
    left: int
    candidates: int
    refused: int
    failures: tuple[str, ...]


def identity(gpu: Gpu) -> Identity:
    return Identity(
        gpu.name,
        gpu.architecture,
        gpu.multiprocessors,
        gpu.driver_version,
        gpu.library.version,
        datetime.datetime.now(datetime.UTC).date().isoformat(),
        gpu.sm_clock_mhz,
        gpu.memory_clock_mhz,
    )


def measure(
    gpu: Gpu,
    requests: Iterable[Request],
    path: Path,
    measure_for_s: float = math.inf,
    progress: Callable[[int, int, Request], None] = lambda done, total, request: None,
) -> Summary:
    """Measure what `path` does not hold yet, in the given order, and stop when the time is over.

    A later run goes on where this one stopped. A request that fails is recorded as such and does not stop the others.
    """
    wanted = {signature(r): r for r in requests if r.kind in CONVOLUTION_KINDS}
    started = time.monotonic()
    done = candidates = refused = 0
    failures: list[str] = []
    with ProfileWriter(path, identity(gpu)) as writer:
        known = writer.known() & wanted.keys()
        missing = [request for key, request in wanted.items() if key not in known]
        trials = Trials(gpu)
        for request in missing:
            if time.monotonic() - started > measure_for_s:
                break
            progress(done, len(missing), request)
            gpu.reset()
            try:
                found = list(measure_request(gpu, trials, request))
            except (MbcError, DoesNotFit) as error:
                found = []
                failures.append(f"{signature(request)}: {error}")
            writer.record(request, found)
            done += 1
            candidates += sum(not m.refused for m in found)
            refused += sum(bool(m.refused) for m in found)
    return Summary(done, len(known), len(missing) - done, candidates, refused, tuple(failures))


def measure_request(gpu: Gpu, trials: Trials, request: Request) -> Iterator[Measurement]:
    """Every admitted configuration of every layout of one convolution, or why it was refused."""
    trial = trials.make(request)
    tried = [Layout.CHANNELS_FIRST]
    if any(layout_matters(t.shape) for t in (*request.inputs, *request.outputs)):
        tried.append(Layout.CHANNELS_LAST)
    for layout in tried:
        mark = gpu.mark()
        try:
            yield from _Bench(gpu, trial, layout).measure()
        except DoesNotFit:
            continue  # the layout is left unmeasured: a GPU that cannot hold the operands cannot run them either
        finally:
            gpu.reset(mark)


class _Bench:
    """The operands of one trial on the GPU in one layout, several times over."""

    def __init__(self, gpu: Gpu, trial: Trial, layout: Layout) -> None:
        self._gpu = gpu
        self._trial = trial
        self._request = trial.request
        self._layout = layout
        self._layouts = (layout,) * 3
        self._types = engine_types(trial.request)
        self._best_us = math.inf
        set_bytes = sum(-(-t.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for t in self._types)
        enough = math.ceil(2 * gpu.l2_bytes / set_bytes) + 1
        most = max(1, int(gpu.left_bytes * COPIES_SHARE) // set_bytes)
        self._sets = [tuple(gpu.take(t.size_bytes) for t in self._types) for _ in range(min(enough, most, MOST_COPIES))]
        # A filter gradient of 16-bit operands still has to be widened to fp32, from staging in the workspace.
        master = trial.request.outputs[0]
        self._widened = self._types[-1].dtype is not master.dtype
        self._staging_bytes = (
            -(-self._types[-1].size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if self._widened else 0
        )
        self._traffic = [gpu.take(2 * master.size_bytes) for _ in range(2)] if self._widened else []
        self._fill()

    def _fill(self) -> None:
        first = self._sets[0]
        for index, operand in enumerate(self._trial.operands):
            tensor = self._types[index]
            data = stored_bytes(operand, tensor.dtype, self._layout)
            self._gpu.upload(first[index], data)
            if not is_filter(self._request, index):
                self._gpu.repeat(first[index], data.size, tensor.size_bytes)
            for other in self._sets[1:]:
                self._gpu.copy(other[index], first[index], tensor.size_bytes)
        self._gpu.synchronize()

    def measure(self) -> Iterator[Measurement]:
        try:
            graph = ConvolutionGraph(self._gpu.device, self._request, self._layouts)
        except CudnnRefusal:
            return  # cuDNN does not take this convolution in this layout
        for configuration, plan in itertools.islice(self._admitted(graph), BEST_PER_LAYOUT):
            mark = self._gpu.mark()
            try:
                yield self._try(configuration, plan)
            except (MbcError, DoesNotFit) as error:
                yield self._measurement(configuration, plan.workspace_bytes, refused=str(error).splitlines()[0])
            finally:
                self._gpu.reset(mark)

    def _admitted(self, graph: ConvolutionGraph) -> Iterator[tuple[Configuration, ConvolutionPlan]]:
        for configuration in graph.configurations():
            if refusal(configuration, self._request.precision) is None:
                # An engine may be offered and yet not support this shape.
                with suppress(CudnnRefusal):
                    yield configuration, graph.plan(configuration)

    def _measurement(self, configuration: Configuration, workspace_bytes: int, refused: str = "") -> Measurement:
        notes = tuple(sorted(configuration.numerical | configuration.behaviour))
        return Measurement(
            PROVIDER,
            self._request.kind,
            (*configuration.settings, ("layout", LAYOUT_CODES[self._layout])),
            self._layouts,
            workspace_bytes + self._staging_bytes,
            0.0,
            0.0,
            configuration.deterministic,
            self._widened,
            notes,
            -1.0,
            refused,
        )

    def _try(self, configuration: Configuration, plan: ConvolutionPlan) -> Measurement:
        gpu = self._gpu
        workspace = gpu.take(plan.workspace_bytes + GUARD_BYTES)
        gpu.fill(workspace, 0xFF, plan.workspace_bytes)
        gpu.fill(workspace + plan.workspace_bytes, GUARD, GUARD_BYTES)
        for pointers in self._sets:
            gpu.fill(pointers[-1], 0xFF, self._types[-1].size_bytes)
        packs = [plan.bind(pointers, workspace if plan.workspace_bytes else 0) for pointers in self._sets]

        def calls(count: int) -> Callable[[], None]:
            def body() -> None:
                for call in range(count):
                    plan.execute(packs[call % len(packs)])
                    if self._widened:  # reads 2 bytes and writes 4 an element: as a copy of 3 bytes an element
                        gpu.copy(self._traffic[0], self._traffic[1], self._types[-1].elements * 3)

            return body

        # Once outside a capture: kernels are loaded then, which a capture does not allow.
        plan.execute(packs[0])
        gpu.synchronize()
        gpu.fill(self._sets[0][-1], 0xFF, self._types[-1].size_bytes)
        base = self._measurement(configuration, plan.workspace_bytes)
        graph = Graph(gpu, calls(len(packs)))
        try:
            graph.launch()
            gpu.synchronize()
            wrong, error = self._check(self._sets[-1][-1], workspace + plan.workspace_bytes)
            if wrong:
                return replace(base, error=error, refused=wrong)
            accumulates = self._widened or self._accumulates(configuration, plan, workspace)
            once_us = gpu.time_us(graph.launch) / len(packs)
            if once_us > HOPELESS * self._best_us:
                return replace(base, time_us=once_us, error=error, accumulates=accumulates)
            repeats = min(MOST_CALLS // len(packs), math.ceil(SHORTEST_GRAPH_US / (once_us * len(packs))))
            count = len(packs) * max(1, repeats)
            if count > len(packs):
                graph.close()
                graph = Graph(gpu, calls(count))
            time_us, spread_us = self._time(graph, count, once_us)
        finally:
            graph.close()
        self._best_us = min(self._best_us, time_us)
        return replace(base, time_us=time_us, spread_us=spread_us, error=error, accumulates=accumulates)

    def _time(self, graph: Graph, calls: int, once_us: float) -> tuple[float, float]:
        """Median and distance between the quartiles, per call."""
        graph.launch()
        replays = max(5, min(200, round(TIMED_US / (once_us * calls))))
        times = sorted(self._gpu.time_us(graph.launch) / calls for _ in range(replays))
        low, _, high = statistics.quantiles(times, n=4)
        return statistics.median(times), high - low

    def _check(self, output: int, guard: int) -> tuple[str, float]:
        """What is wrong with the result at `output`, if anything, and its distance from the reference."""
        if (self._gpu.download(guard, GUARD_BYTES) != GUARD).any():
            return "it writes beyond its workspace", -1.0
        error = self._distance(output)
        if math.isnan(error):
            return "it leaves elements of its output unwritten", -1.0
        if error > TOLERANCES[self._request.precision]:
            return f"its result is {error:.2e} off, {TOLERANCES[self._request.precision]:.0e} is allowed", error
        return "", error

    def _distance(self, output: int) -> float:
        tensor = self._types[-1]
        if is_filter(self._request, 2):
            return distance(self._trial, (), self._read(output, tensor))
        rows = checked_rows(self._request)
        row = tensor.with_rows(1)
        errors = (distance(self._trial, (r,), self._read(output + r * row.size_bytes, row)) for r in rows)
        return max(errors, key=lambda error: math.inf if math.isnan(error) else error)

    def _read(self, address: int, tensor: TensorType) -> Floats:
        data = self._gpu.download(address, tensor.size_bytes)
        return loaded(data, tensor.shape, tensor.dtype, self._layout)

    def _accumulates(self, configuration: Configuration, plan: ConvolutionPlan, workspace: int) -> bool:
        """Whether the engine adds to its output when asked to, within the same workspace."""
        if not is_filter(self._request, 2) or self._types[-1].dtype is not DType.FP32:
            return False
        pointers = self._sets[0]
        with suppress(CudnnRefusal):
            adding = ConvolutionGraph(self._gpu.device, self._request, self._layouts, beta=1.0)
            again = adding.plan(adding.rebuild(configuration.settings))
            if again.workspace_bytes > plan.workspace_bytes:
                return False
            bound = again.bind(pointers, workspace if plan.workspace_bytes else 0)
            self._gpu.fill(pointers[-1], 0, self._types[-1].size_bytes)
            again.execute(bound)
            again.execute(bound)
            self._gpu.synchronize()
            result = self._read(pointers[-1], self._types[-1]) / 2
            return distance(self._trial, (), result) <= TOLERANCES[self._request.precision]
        return False


def requests_in_turn(groups: Sequence[Sequence[Request]]) -> Iterator[Request]:
    """The requests of several networks, each once, the first of every network first: what stops early is of use to
    all of them."""
    seen: set[str] = set()
    for place in range(max(map(len, groups), default=0)):
        for group in groups:
            if place < len(group) and (key := signature(group[place])) not in seen:
                seen.add(key)
                yield group[place]
