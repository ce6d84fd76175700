"""The workbench of a real GPU."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

import numpy as np

from mbc.errors import MbcError
from mbc.hardware.collective_times import ConcurrentKernel
from mbc.hardware.transfers import HostLink, PeerLink
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda import OWN, programs_of
from mbc.kernels.cudnn import CUDNN
from mbc.kernels.providers import PROVIDERS
from mbc.kernels.statistics import STATISTICS_GROUPS
from mbc.measure.clock import Clock, calls_per_graph
from mbc.measure.gemm_harness import ProductHarness
from mbc.measure.gemm_trial import PRODUCT_KINDS, Trials
from mbc.measure.gpu import Gpu, Graph
from mbc.measure.host_copies import GpuTransfers, measure_link, measure_peer_link
from mbc.measure.kernel_library import Call, KernelLibrary
from mbc.measure.need import Need
from mbc.measure.offers import Offered, device_spec, offers
from mbc.measure.own_kernel_harness import PlainHarness
from mbc.measure.protocols import Harness
from mbc.measure.statistics_harness import StatisticsHarness
from mbc.ops.activation import Scale
from mbc.ops.base import NoAttributes
from mbc.ops.convolution import Convolution
from mbc.ops.matrix import Linear
from mbc.profile.model import Identity
from mbc.runtime.formats import stored_bytes
from mbc.runtime.lender import Lent, borrow

WARM_S = 0.3
WARM_SIDE = 4096  # side of the matrices that are multiplied meanwhile
STREAMED_L2S = 4  # a streaming kernel reads and writes so many times the size of the L2 cache
CONCURRENT_KERNELS = ("batch_statistics",)  # of files of mbc, that run beside collectives; `scaling` is generated
CONVOLUTION_WORKSPACE_BYTES = 64 << 20
CACHED_PARTS = 8  # a cached kernel reads and writes one of so many parts of the L2 cache


def scaling(precision: Precision, size_bytes: int) -> Request:
    """Return a request that reads and writes `size_bytes` bytes and computes almost nothing."""
    vector = TensorType((size_bytes // precision.working.size_bytes,), precision.working)
    return Request("scale", Scale(), (vector,), (vector,), precision)


def identity(gpu: Gpu) -> Identity:
    """Return the identity of the GPU, with the versions of driver and cuDNN, for a profile."""
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


class Bench:
    """The workbench of a real GPU; a context manager."""

    def __init__(self, gpu: Gpu, open_library: Callable[[Gpu, Precision], KernelLibrary] = KernelLibrary.open) -> None:
        """Measure on `gpu` with the libraries that `open_library` opens."""
        self.gpu = gpu
        self.spec = device_spec(gpu)
        self.clock = Clock(gpu)
        self.trials = Trials(gpu)
        self._open_library = open_library
        self._libraries: dict[DType, KernelLibrary] = {}
        self._closing = ExitStack()

    def __enter__(self) -> Bench:
        """Return this workbench."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the libraries."""
        self._closing.close()

    def library(self, precision: Precision) -> KernelLibrary:
        """Return the kernels of the precision's working type."""
        library = self._libraries.get(precision.working)
        if library is None:
            library = self._closing.enter_context(self._open_library(self.gpu, precision))
            self._libraries[precision.working] = library
        return library

    def expect(self, requests: Sequence[Request]) -> None:
        """Compile the kernels that are generated for requests, many at once.

        Raises:
            MbcError: As `KernelLibrary.open` and `GeneratedLibraries.add`.
        """
        programs = [program for request in requests for program in programs_of(request)]
        generated = self.library(requests[0].precision).generated if programs else None
        if generated is not None:
            generated.add(programs)

    def identity(self) -> Identity:
        """Return the identity of the GPU."""
        return identity(self.gpu)

    def offers(self, request: Request, workspace_limit_bytes: int) -> Offered:
        """Return the candidates for `request`."""
        return offers(self.gpu, request, workspace_limit_bytes)

    def warm(self, precision: Precision) -> None:
        """Work until the clock rates are those of a GPU that has been busy for a while."""
        mark = self.gpu.mark()
        try:
            call = self._product(precision)
            started = time.monotonic()
            while time.monotonic() - started < WARM_S:
                self.gpu.times_us(call.enqueue, 10)
        finally:
            self.gpu.reset(mark)

    def _product(self, precision: Precision) -> Call:
        """Return a call of a GEMM, which only computes."""
        matrix = TensorType((WARM_SIDE, WARM_SIDE), precision.working)
        request = Request("linear", Linear((WARM_SIDE,)), (matrix, matrix), (matrix,), precision)
        pointers = [self.gpu.take(matrix.size_bytes) for _ in range(3)]
        for pointer in pointers:
            self._fill(pointer, matrix)
        return self._any_call(request, pointers)

    def _fill(self, pointer: int, tensor: TensorType) -> None:
        """Fill a tensor of at least WARM_SIDE elements with random numbers."""
        row = np.random.default_rng(0).standard_normal(WARM_SIDE, np.float32)
        self.gpu.upload(pointer, stored_bytes(row, tensor.dtype, Layout.CHANNELS_FIRST))
        self.gpu.repeat(pointer, WARM_SIDE * tensor.dtype.size_bytes, tensor.size_bytes)

    def _scaling(self, precision: Precision, size_bytes: int) -> Call:
        """Return a call of `scaling`."""
        request = scaling(precision, size_bytes)
        pointers = tuple(self.gpu.take(t.size_bytes) for t in (*request.inputs, *request.outputs))
        candidate = next(iter(OWN.candidates(request, self.spec)))
        return self.library(precision).prepare(candidate, request, pointers, 0)

    def _any_call(self, request: Request, pointers: Sequence[int]) -> Call:
        """Return a call of the first candidate without workspace."""
        candidates = (c for p in PROVIDERS for c in p.candidates(request, self.spec) if not c.workspace_bytes)
        return self.library(request.precision).prepare(next(candidates), request, pointers, 0)

    def graph_gap_us(self, precision: Precision) -> float:
        """Return the time from one node of a graph to the next if the nodes do almost nothing, in microseconds."""
        mark = self.gpu.mark()
        try:
            call = self._scaling(precision, precision.working.size_bytes)
            call.enqueue()  # loads the kernel, which a capture does not allow
            return self.clock.gap_us(call.enqueue)
        finally:
            self.gpu.reset(mark)

    def host_link(self, precision: Precision) -> HostLink:
        """Measure copies to the host and back."""
        with self._beside_copies(precision) as kernels:
            return measure_link(GpuTransfers(self.gpu, kernels))

    def peer_link(self, precision: Precision) -> PeerLink:
        """Measure copies to another GPU and back.

        Raises:
            MbcError: MBC105 or MBC106, no GPU lends memory.
        """
        lent: list[Lent] = []

        def lend(size_bytes: int) -> int:
            memory = borrow(self.gpu.driver, size_bytes)
            assert memory is not None, "copies have bytes"
            lent.append(memory)
            return memory.address

        try:
            with self._beside_copies(precision) as kernels:
                return measure_peer_link(GpuTransfers(self.gpu, kernels, lend))
        finally:
            for memory in lent:
                memory.free()

    @contextmanager
    def _beside_copies(self, precision: Precision) -> Generator[Mapping[str, Callable[[], None]]]:
        """Yield a kernel of each kind that copies slow down, which runs for long enough that the CPU keeps up.

        The computing kernel is a convolution: copies slow a GEMM at the GPU's peak by 11 %, a slowdown that steps with
        offloading do not show (decision 020).
        """
        mark = self.gpu.mark()
        graphs: dict[str, Graph] = {}
        try:
            calls = {
                "streaming": self._scaling(precision, STREAMED_L2S * self.gpu.l2_bytes),
                "cached": self._scaling(precision, self.gpu.l2_bytes // CACHED_PARTS),
                "computing": self._computing(precision),
            }
            for kind, call in calls.items():
                graphs[kind] = self._repeated(call)
            yield {kind: graph.launch for kind, graph in graphs.items()}
        finally:
            for graph in graphs.values():
                graph.close()
            self.gpu.reset(mark)

    def _computing(self, precision: Precision) -> Call:
        """Return a convolution, or a GEMM if cuDNN has no convolution: the rates of copies do not depend on it."""
        try:
            return self._convolution(precision)
        except MbcError:
            return self._product(precision)

    def _repeated(self, call: Call) -> Graph:
        """Return a graph of enough calls that the CPU keeps up with it."""
        call.enqueue()  # loads the kernel, which a capture does not allow
        count = calls_per_graph(1, self.clock.once_us(call.enqueue))

        def body() -> None:
            for _ in range(count):
                call.enqueue()

        return Graph(self.gpu, body)

    @contextmanager
    def kernels_for_collectives(self, precision: Precision) -> Generator[Mapping[ConcurrentKernel, Graph]]:
        """Yield graphs of kernels of each kind, of about 0.2 ms or more.

        The library needs CONCURRENT_KERNELS and the kernel of `scaling` only.
        """
        graphs: dict[ConcurrentKernel, Graph] = {}
        try:
            calls = {
                ConcurrentKernel.CONVOLUTION: self._convolution(precision),
                ConcurrentKernel.GEMM: self._product(precision),
                ConcurrentKernel.ELEMENTWISE: self._scaling(precision, STREAMED_L2S * self.gpu.l2_bytes),
                ConcurrentKernel.REDUCTION: self._statistics(precision),
            }
            for kind, call in calls.items():
                graphs[kind] = self._repeated(call)
            yield graphs
        finally:
            for graph in graphs.values():
                graph.close()

    def _convolution(self, precision: Precision) -> Call:
        """Return a 3x3 convolution from the middle of a ResNet, channels last, with the first engine that runs it."""
        image = TensorType((64, 128, 28, 28), precision.working)
        filters = TensorType((128, 128, 3, 3), precision.working)
        attributes = Convolution((28, 28), (3, 3), pad=(1, 1, 1, 1))
        request = Request("convolution", attributes, (image, filters), (image,), precision)
        pointers = [self.gpu.take(t.size_bytes) for t in (image, filters, image)]
        for pointer, tensor in zip(pointers, (image, filters), strict=False):
            self._fill(pointer, tensor)
        workspace = self.gpu.take(CONVOLUTION_WORKSPACE_BYTES)
        for offer in self.offers(request, CONVOLUTION_WORKSPACE_BYTES).offers:
            if offer.candidate.provider == CUDNN.name and offer.candidate.layouts[0] is Layout.CHANNELS_LAST:
                with suppress(MbcError):
                    return self.library(precision).prepare(offer.candidate, request, pointers, workspace)
        raise MbcError("MBC077", "no engine of cuDNN runs a 3x3 convolution on this GPU", "run `mbc doctor`")

    def _statistics(self, precision: Precision) -> Call:
        """Return the reduction of batch normalization: means and variances of the channels of a large image."""
        image, vector = TensorType((64, 256, 56, 56), precision.working), TensorType((256,), DType.FP32)
        request = Request("batch_statistics", NoAttributes(), (image,), (vector, vector), precision)
        pointers = [self.gpu.take(t.size_bytes) for t in (image, vector, vector)]
        candidates = (c for c in OWN.candidates(request, self.spec) if c.layouts[0] is Layout.CHANNELS_LAST)
        candidate = next(candidates)
        return self.library(precision).prepare(candidate, request, pointers, self.gpu.take(candidate.workspace_bytes))

    @contextmanager
    def open(self, need: Need) -> Generator[Harness, None, None]:
        """Yield the harness of one operation; its operands use the whole block of the GPU."""
        self.gpu.reset()
        request = need.undivided
        library = self.library(request.precision)
        try:
            if request.kind in PRODUCT_KINDS:
                yield ProductHarness(self.gpu, library, self.clock, self.trials.make(request), request)
            elif request.kind in STATISTICS_GROUPS:
                yield StatisticsHarness(self.gpu, library, self.clock, self.trials.make(request), request)
            else:
                yield PlainHarness(self.gpu, library, self.clock, request)
        finally:
            self.gpu.reset()
