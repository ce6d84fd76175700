"""The candidates of every provider to measure for one request, and notes on those left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from mbc.hardware.spec import DeviceSpec
from mbc.hardware.target import local_spec
from mbc.ir.types import Layout, layout_matters
from mbc.kernels.base import LAYOUT_CODES, Candidate, Request
from mbc.kernels.cuda import OWN
from mbc.kernels.cudnn import CUDNN
from mbc.kernels.cudnn_estimates import widened_bytes
from mbc.kernels.cudnn_statistics import sums_bytes
from mbc.kernels.providers import LISTED_BY_CUDNN, PROVIDERS
from mbc.kernels.statistics import WITH_STATISTICS
from mbc.measure.cudnn_engines import FAST_ALGORITHMS, Configuration, refusal
from mbc.measure.cudnn_graph import ConvolutionGraph
from mbc.measure.cudnn_library import CudnnRefusal
from mbc.measure.cudnn_passes import ENGINE_KINDS
from mbc.measure.gpu import Gpu
from mbc.measure.legacy_algorithms import legacy_candidates
from mbc.units import show_size

BEST_PER_LAYOUT = 8  # engines, in the heuristics' order; after them only engines that need less workspace


@dataclass(frozen=True, slots=True)
class Offer:
    """A candidate to try, with its numerical notes; its `time_us` is an estimate, or 0."""

    candidate: Candidate
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """The key that identifies the candidate at every size of an operation."""
        c = self.candidate
        return c.provider, c.name, c.settings, c.layouts


@dataclass(frozen=True, slots=True)
class Offered:
    """Candidates for one request.

    `offers` are tried. `spare` ones are mbc's own kernels for operations that libraries run, too; they are tried only
    if their estimate is near the time of the best library kernel. `left_out` are notes.
    """

    offers: tuple[Offer, ...]
    spare: tuple[Offer, ...] = ()
    left_out: tuple[str, ...] = ()


def offers(gpu: Gpu, request: Request, workspace_limit_bytes: int) -> Offered:
    """Return every candidate that may run `request` within the limit of workspace.

    Of cuDNN's engines these are the best eight of the heuristics for each layout, then, in the order of the heuristics,
    those that need less workspace than all before. Of cuDNN's legacy algorithms and of other providers these are all. A
    candidate with one of cuDNN's fast algorithms is offered in every precision, because its error is measured.
    """
    search = _Search(workspace_limit_bytes)
    spec = device_spec(gpu)
    if request.kind in ENGINE_KINDS:
        search.take(_engines(gpu, request, search))
        legacy = legacy_candidates(gpu.library, gpu.device.handle, request)
        search.take(Offer(candidate, notes) for candidate, notes in legacy)
    for provider in PROVIDERS:
        if provider.name not in LISTED_BY_CUDNN and provider.name != OWN.name:
            search.take(Offer(c) for c in provider.candidates(request, spec))
    libraries, search.offers = search.offers, []
    search.take(Offer(c) for c in OWN.candidates(request, spec))
    own = search.offers
    if search.beyond:
        search.notes.append(
            f"{search.beyond} candidates that need more than {show_size(workspace_limit_bytes)} of workspace"
        )
    if not libraries:
        return Offered(tuple(own), (), tuple(search.notes))
    return Offered(tuple(libraries), tuple(own), tuple(search.notes))


@dataclass
class _Search:
    limit_bytes: int
    offers: list[Offer] = field(default_factory=list[Offer])
    notes: list[str] = field(default_factory=list[str])
    beyond: int = 0

    def take(self, offered: Iterator[Offer]) -> None:
        for offer in offered:
            if offer.candidate.workspace_bytes <= self.limit_bytes:
                self.offers.append(offer)
            else:
                self.beyond += 1


def _engines(gpu: Gpu, request: Request, search: _Search) -> Iterator[Offer]:
    """Yield the engines of cuDNN's graph API in both layouts."""
    tried = [Layout.CHANNELS_FIRST]
    if any(layout_matters(t.shape) for t in (*request.inputs, *request.outputs)):
        tried.append(Layout.CHANNELS_LAST)
    refused: Counter[str] = Counter()
    for layout in tried:
        try:
            graph = ConvolutionGraph(gpu.device, request, (layout,) * 3)
        except CudnnRefusal:
            search.notes.append(f"cuDNN's engines do not support this convolution in {layout.value}")
            continue
        yield from _engines_in(graph, request, layout, search, refused)
    search.notes += [f"{count} engines: {reason}" for reason, count in sorted(refused.items())]


def _engines_in(
    graph: ConvolutionGraph, request: Request, layout: Layout, search: _Search, refused: Counter[str]
) -> Iterator[Offer]:
    front_bytes = _front_bytes(request)
    count, least_bytes = 0, search.limit_bytes + 1
    for configuration in graph.configurations():
        reason = refusal(configuration, request.precision, admitted=FAST_ALGORITHMS)
        if reason is not None:
            refused[reason] += 1
            continue
        if count >= BEST_PER_LAYOUT and least_bytes == front_bytes:
            search.notes.append(f"{layout.value} engines after the best {count}")
            return
        try:
            workspace_bytes = graph.plan(configuration).workspace_bytes + front_bytes
        except CudnnRefusal:
            continue  # the heuristics list it although it does not support this shape
        if count >= BEST_PER_LAYOUT and workspace_bytes >= least_bytes:
            continue
        yield engine_offer(request, layout, configuration, workspace_bytes)
        if workspace_bytes <= search.limit_bytes:
            count += 1
            least_bytes = min(least_bytes, workspace_bytes)


def _front_bytes(request: Request) -> int:
    """Return the bytes of the workspace that precede the engine's."""
    if request.kind == "convolution_backward_filter":
        return widened_bytes(request.outputs[0], request.inputs[0].dtype)
    return sums_bytes(request.outputs[0]) if request.kind == WITH_STATISTICS else 0


def engine_offer(request: Request, layout: Layout, configuration: Configuration, workspace_bytes: int) -> Offer:
    """Return an engine as `mbc.kernels.cudnn` runs it; vectors have one layout only."""
    candidate = Candidate(
        CUDNN.name,
        request.kind,
        (
            ("deterministic", int(configuration.deterministic)),
            *configuration.settings,
            ("layout", LAYOUT_CODES[layout]),
        ),
        tuple(layout if len(t.shape) > 1 else Layout.CHANNELS_FIRST for t in (*request.inputs, *request.outputs)),
        workspace_bytes,
        0.0,
        False,
        configuration.deterministic,
        request.kind == "convolution_backward_filter",
    )
    return Offer(candidate, tuple(sorted(configuration.numerical | configuration.behaviour)))


def device_spec(gpu: Gpu) -> DeviceSpec:
    """Return the data of this GPU; by the driver, if it is not listed."""
    return local_spec(gpu.name, gpu.architecture)
