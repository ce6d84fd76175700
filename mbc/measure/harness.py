"""The benchmark harness: runs candidates on a GPU as a plan would, checks their results, and times them.

Every candidate starts with garbage in its output and its workspace, and must not write beyond the workspace.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

from mbc.errors import MbcError
from mbc.ir.types import Layout
from mbc.kernels.base import Candidate, Request
from mbc.measure.clock import Clock, Times
from mbc.measure.gpu import DoesNotFit, Gpu
from mbc.measure.kernel_library import Call, KernelLibrary
from mbc.measure.offers import Offer
from mbc.measure.operand_buffers import Buffers, Pointers
from mbc.measure.protocols import Attempt, GpuFailed, Place
from mbc.profile.signature import asked_kind

GUARD_BYTES = 256
GUARD = 0x5A
PROBED_PARTS = 32  # one of so many parts of the rows is run first, to skip candidates that are far too slow
POISON = 0xFF  # bytes of NaN
WORKSPACE_SHARE = 0.8  # of the remaining memory; the comparison needs some too


class Checker(Protocol):
    """Compares the outputs of a request with a reference."""

    def wrong(self, candidate: Candidate, at: Pointers) -> tuple[str, float]:
        """Return an error message, empty if the results at `at` are right, and their distance from the reference."""
        ...

    def adds(self, candidate: Candidate, at: Pointers, call: Call) -> bool:
        """Return whether `call` adds to its output."""
        ...


class Harness:
    """Base class of the harnesses of all kinds."""

    def __init__(self, gpu: Gpu, library: KernelLibrary, clock: Clock, request: Request, period: int) -> None:
        """Allocate the operands of `request`; `period` is the number of rows after which operands repeat."""
        self.gpu = gpu
        self.clock = clock
        self.largest = request
        self.library = library
        kind = asked_kind(request)
        pairs = kind.updates if kind is not None else ()
        self.shared = {o: i for o, i in pairs if o < len(request.outputs) and i < len(request.inputs)}
        self.buffers = Buffers(gpu, request, self.fill, tuple(self.shared.items()), period)

    def fill(self, index: int, layout: Layout, address: int) -> None:
        """Write the values of input `index` in `layout` at `address`."""
        raise NotImplementedError

    def checker(self, request: Request, offered: Sequence[Offer]) -> Checker:
        """Return a checker of the results of the offers."""
        raise NotImplementedError

    def part(self, request: Request, rows: int) -> Request | None:
        """Return the operation on its first `rows` rows, or None if it cannot be divided."""
        return None

    @contextmanager
    def at(self, request: Request, offered: Sequence[Offer]) -> Generator[Place, None, None]:
        """Yield the place for one size of the operation.

        Raises:
            DoesNotFit: The operands do not fit the GPU's memory.
            GpuFailed: The GPU failed.
        """
        try:
            for layouts in dict.fromkeys(o.candidate.layouts for o in offered):
                self.buffers.ensure(layouts)
            mark = self.gpu.mark()
            try:
                yield _Place(self, request, self.checker(request, offered), offered)
            finally:
                self.gpu.synchronize()
                self.library.clear()
                self.gpu.reset(mark)
        except self.gpu.failures as error:
            raise GpuFailed(str(error)) from error


class _Place:
    def __init__(self, harness: Harness, request: Request, checker: Checker, offered: Sequence[Offer]) -> None:
        self._harness = harness
        self._gpu = harness.gpu
        self._clock = harness.clock
        self._request = request
        self._checker = checker
        self._sets: dict[tuple[Layout, ...], list[Pointers]] = {}
        wanted = max((o.candidate.workspace_bytes for o in offered), default=0)
        self._available_bytes = min(wanted, int(self._gpu.left_bytes * WORKSPACE_SHARE))
        self._workspace = self._gpu.take(self._available_bytes + GUARD_BYTES)

    def attempt(self, offer: Offer, hopeless_us: float, skip_us: float = math.inf) -> Attempt:
        with self._failing():
            try:
                least_us = self._probe_us(offer.candidate, skip_us) if math.isfinite(skip_us) else 0.0
                if least_us > skip_us:
                    return Attempt(offer, least_us, -1.0, skipped=True)
                return self._attempt(offer, hopeless_us)
            except MbcError as error:
                return Attempt(offer, 0.0, -1.0, str(error).splitlines()[0])

    def _attempt(self, offer: Offer, hopeless_us: float) -> Attempt:
        candidate, at = offer.candidate, self._at(offer.candidate)[0]
        if candidate.workspace_bytes > self._available_bytes:
            raise DoesNotFit(f"its workspace of {candidate.workspace_bytes} bytes does not fit")
        guard = self._workspace + candidate.workspace_bytes
        self._gpu.fill(self._workspace, POISON, candidate.workspace_bytes)
        self._gpu.fill(guard, GUARD, GUARD_BYTES)
        self._poison(at)
        call = self._prepare(candidate, at)
        least_us = self._eager_us(call)
        wrong, error = self._checker.wrong(candidate, at)
        if not wrong and (self._gpu.download(guard, GUARD_BYTES) != GUARD).any():
            wrong = "it writes beyond its workspace"
        if wrong:
            return Attempt(offer, 0.0, error, wrong)
        if (least_us := self._again_us(call, least_us, hopeless_us)) > hopeless_us:
            return Attempt(offer, least_us, error, hopeless=True)
        return Attempt(offer, self._clock.once_us(call.enqueue), error)

    def _probe_us(self, candidate: Candidate, skip_us: float) -> float:
        """Return an estimate of the whole time from a run on few rows; 0 if there is none."""
        rows = self._request.inputs[0].shape[0]
        part = self._harness.part(self._request, max(1, rows // PROBED_PARTS))
        if part is None or candidate.workspace_bytes > self._available_bytes:
            return 0.0
        try:
            pointers = self._at(candidate)[0].addresses
            call = self._harness.library.prepare(candidate, part, pointers, self._workspace)
            times = rows / part.inputs[0].shape[0]
            return self._again_us(call, self._eager_us(call), skip_us / times) * times
        except MbcError:
            return 0.0  # the engine may not support so few rows

    def _again_us(self, call: Call, first_us: float, enough_us: float) -> float:
        """Return the smaller of a first and a second time.

        The second is measured only if the first exceeds `enough_us`.

        The first run may load a kernel, which can delay the GPU for longer than the host's time shows.
        """
        return first_us if first_us <= enough_us else min(first_us, self._eager_us(call))

    def _eager_us(self, call: Call) -> float:
        """Run a call outside a capture, and return a lower bound of its time.

        Kernels cannot be loaded within a capture. To load one takes time on the host while the GPU waits, so the host's
        time is subtracted from the time between two events.
        """
        host_us = 0.0

        def work() -> None:
            nonlocal host_us
            started = time.perf_counter()
            call.enqueue()
            host_us = (time.perf_counter() - started) * 1e6

        return self._gpu.times_us(work, 1)[0] - host_us

    @contextmanager
    def _failing(self) -> Generator[None, None, None]:
        try:
            yield
        except self._gpu.failures as error:
            raise GpuFailed(str(error)) from error

    def _poison(self, at: Pointers) -> None:
        for number, (address, tensor) in enumerate(zip(at.outputs, self._request.outputs, strict=True)):
            if number not in self._harness.shared:
                self._gpu.fill(address, POISON, tensor.size_bytes)

    def adds(self, attempt: Attempt) -> bool:
        candidate = attempt.offer.candidate
        at = self._at(candidate)[0]
        with self._failing():
            try:
                return self._checker.adds(candidate, at, self._prepare(candidate, at, accumulate=True))
            except MbcError:
                return False

    def _prepare(self, candidate: Candidate, at: Pointers, accumulate: bool = False) -> Call:
        return self._harness.library.prepare(candidate, self._request, at.addresses, self._workspace, accumulate)

    def _at(self, candidate: Candidate) -> list[Pointers]:
        pointers = self._sets.get(candidate.layouts)
        if pointers is None:
            pointers = self._sets[candidate.layouts] = self._harness.buffers.sets(self._request, candidate.layouts)
        return pointers

    def time(self, attempt: Attempt, budget_us: float, accumulate: bool = False) -> Times:
        candidate = attempt.offer.candidate
        with self._failing():
            calls = [self._prepare(candidate, at, accumulate).enqueue for at in self._at(candidate)]
            return self._clock.times(calls, attempt.once_us, budget_us)
