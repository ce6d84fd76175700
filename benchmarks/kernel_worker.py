"""Time launches of mbc's own kernels when asked, in a process that may run another checkout's code (`in_turns.py`).

Run as `PYTHONPATH=CHECKOUT python benchmarks/kernel_worker.py KERNEL ...` with the kernels written by hand that will be
asked for.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from in_turns import answer_requests

if TYPE_CHECKING:
    from mbc.ir.types import Precision
    from mbc.kernels.base import Candidate, Request
    from mbc.measure.gpu import Gpu
    from mbc.measure.kernel_library import KernelLibrary
    from mbc.measure.workbench import Bench

GENERATED = "generated"  # in place of the kernel that is generated for a request
MEMORY_SHARE = 0.4  # of the free memory: two workers share a GPU
SAMPLED = 4096  # elements of an output


class Launches:
    """Launches of several kernels for one request, on the same operands."""

    def __init__(self, bench: Bench) -> None:
        """Launch on the workbench's GPU."""
        self._bench = bench
        self._closing = ExitStack()
        self._calls: dict[str, tuple[list[Callable[[], None]], float]] = {}

    def answer(self, **request: Any) -> Any:
        """Answer `expect`, `open` or `time`, whose values are the first argument of the method of that name."""
        (method,) = {"expect", "open", "time"} & request.keys()
        return getattr(self, method)(**request)

    def expect(self, expect: Sequence[str]) -> None:
        """Compile the kernels that are generated for requests with these signatures, many at once."""
        from mbc.profile.signature import read_signature

        requests = sorted(map(read_signature, expect), key=lambda request: request.precision)
        for _, of_precision in groupby(requests, lambda request: request.precision):
            self._bench.expect(list(of_precision))

    def open(self, open: str, layouts: Sequence[str], kernels: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Prepare kernels for the request of the signature `open`, and return a sample of their outputs by their names.

        A kernel that cannot run has `refused` instead.
        """
        from mbc.ir.types import Layout
        from mbc.measure.need import Need
        from mbc.profile.signature import read_signature

        self.close()
        request = read_signature(open)
        harness: Any = self._closing.enter_context(self._bench.open(Need((request,), 0.0)))
        orders = tuple(map(Layout, layouts))
        return {name: self._prepare(harness, request, name, orders) for name in kernels}

    def _prepare(self, harness: Any, request: Request, name: str, layouts: tuple[Any, ...]) -> dict[str, Any]:
        from mbc.errors import MbcError
        from mbc.runtime.formats import loaded

        candidate = self._candidate(request, name, layouts)
        if candidate is None:
            return {"refused": "no such kernel takes the request in these layouts"}
        gpu = harness.gpu
        harness.buffers.ensure(layouts)
        places = harness.buffers.sets(request, layouts)
        workspace = gpu.take(candidate.workspace_bytes)
        try:
            calls = [harness.library.prepare(candidate, request, at.addresses, workspace) for at in places]
            calls[0].enqueue()  # loads the kernel, which a capture does not allow
        except MbcError as error:
            return {"refused": str(error).splitlines()[0]}
        gpu.synchronize()
        sample: list[list[float]] = []
        for address, type_, layout in zip(
            places[0].outputs, request.outputs, layouts[len(request.inputs) :], strict=True
        ):
            values = loaded(gpu.download(address, type_.size_bytes), type_.shape, type_.dtype, layout).ravel()
            sample.append(values[:: max(1, values.size // SAMPLED)].astype(np.float64).tolist())
        work = [call.enqueue for call in calls]
        self._calls[name] = work, harness.clock.once_us(work[0])
        return {"kernel": candidate.name, "sample": sample}

    def _candidate(self, request: Request, name: str, layouts: tuple[Any, ...]) -> Candidate | None:
        """Return the candidate of a kernel, whether or not the search would be offered it."""
        from mbc.kernels.base import Candidate
        from mbc.kernels.cuda import OWN
        from mbc.kernels.cuda.base import PROVIDER, layout_of

        if name != GENERATED:
            offered = OWN.candidates(request, self._bench.spec)
            return next((c for c in offered if c.name == name and c.layouts == layouts), None)
        from mbc.kernels.cuda.generated.generated_map import generated_kernel

        kernel = generated_kernel(request)
        if kernel is None or layouts not in kernel.layouts(request):
            return None
        workspace_bytes = kernel.workspace(request, layout_of(request, layouts))
        return Candidate(
            PROVIDER, kernel.name, kernel.settings, layouts, workspace_bytes, 0.0, False, accumulates=kernel.accumulates
        )

    def time(self, time: str, budget_us: float) -> float:
        """Return the median time of a launch of the open kernel `time`, in us, from replays for about `budget_us`."""
        calls, once_us = self._calls[time]
        return self._bench.clock.times(calls, once_us, budget_us).median_us

    def close(self) -> None:
        """Free the operands."""
        self._calls.clear()
        self._closing.close()


def opened(gpu: Gpu, precision: Precision, kernels: Sequence[str]) -> KernelLibrary:
    """Return a library of those kernels that are written by hand, and of kernels that are generated for requests."""
    from mbc.codegen.build import build_kernel_library
    from mbc.codegen.render_sources import every_kernel_file
    from mbc.codegen.toolchain import find_toolchain
    from mbc.kernels.cuda import KERNELS
    from mbc.measure.kernel_library import KernelLibrary

    files = set(every_kernel_file())
    written = [name for name in kernels if name in KERNELS and KERNELS[name].file.rpartition("/")[2] in files]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "libkernels.so"
        build_kernel_library(gpu.architecture, precision, path, find_toolchain(), written)
        library = KernelLibrary(path, gpu.stream_handle.value or 0)  # once loaded, it does not need its file
    if find_spec("mbc.measure.generated_libraries"):  # which earlier checkouts lack
        library.generated = import_module("mbc.measure.generated_libraries").GeneratedLibraries.of(
            gpu.architecture, precision
        )
    return library


def main() -> None:
    """Answer the requests of standard input."""
    from mbc.ir.types import Precision
    from mbc.measure.gpu import Gpu
    from mbc.measure.workbench import Bench

    with Bench(Gpu(MEMORY_SHARE), partial(opened, kernels=sys.argv[1:])) as bench:
        bench.warm(Precision.BF16)
        answer_requests(Launches(bench).answer)


if __name__ == "__main__":
    main()
