"""Runs candidates on a GPU as a plan would run them, checks what they compute, and times them.

Every candidate runs on garbage in its output and its workspace, and must not write behind the latter.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

from mbc.device.bench import Attempt, GpuFailed, Place
from mbc.device.buffers import Buffers, Pointers
from mbc.device.clock import Clock, Times
from mbc.device.gpu import DoesNotFit, Gpu
from mbc.device.kernel_library import Call, KernelLibrary
from mbc.device.offers import Offer
from mbc.device.signature import asked_kind
from mbc.errors import MbcError
from mbc.ir.types import Layout
from mbc.kernels.base import Candidate, Request

GUARD_BYTES = 256
GUARD = 0x5A
LOADING_US = 100e3  # that loading a kernel may add to its first run
POISON = 0xFF  # every element of it is no number
WORKSPACE_SHARE = 0.8  # of the memory that is left; comparing needs some too


class Checker(Protocol):
    """Knows what the outputs of a request must be."""

    def wrong(self, candidate: Candidate, at: Pointers) -> tuple[str, float]:
        """What is wrong with the results there, if anything, and their distance from the reference."""
        ...

    def adds(self, candidate: Candidate, at: Pointers, call: Call) -> bool:
        """Whether `call` adds to what is there."""
        ...


class Stand:
    """What stands of all kinds have in common. `period`: rows after which operands repeat."""

    def __init__(self, gpu: Gpu, library: KernelLibrary, clock: Clock, request: Request, period: int) -> None:
        self.gpu = gpu
        self.clock = clock
        self.largest = request
        self.library = library
        kind = asked_kind(request)
        pairs = kind.updates if kind is not None else ()
        self.shared = {o: i for o, i in pairs if o < len(request.outputs) and i < len(request.inputs)}
        self.buffers = Buffers(gpu, request, self.fill, tuple(self.shared.items()), period)

    def fill(self, index: int, layout: Layout, address: int) -> None:
        raise NotImplementedError

    def checker(self, request: Request, offered: Sequence[Offer]) -> Checker:
        raise NotImplementedError

    @contextmanager
    def at(self, request: Request, offered: Sequence[Offer]) -> Generator[Place, None, None]:
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
    def __init__(self, stand: Stand, request: Request, checker: Checker, offered: Sequence[Offer]) -> None:
        self._stand = stand
        self._gpu = stand.gpu
        self._clock = stand.clock
        self._request = request
        self._checker = checker
        self._sets: dict[tuple[Layout, ...], list[Pointers]] = {}
        wanted = max((o.candidate.workspace_bytes for o in offered), default=0)
        self._room_bytes = min(wanted, int(self._gpu.left_bytes * WORKSPACE_SHARE))
        self._workspace = self._gpu.take(self._room_bytes + GUARD_BYTES)

    def attempt(self, offer: Offer, hopeless_us: float) -> Attempt:
        with self._failing():
            try:
                return self._attempt(offer, hopeless_us)
            except MbcError as error:
                return Attempt(offer, 0.0, -1.0, str(error).splitlines()[0])

    def _attempt(self, offer: Offer, hopeless_us: float) -> Attempt:
        candidate, at = offer.candidate, self._at(offer.candidate)[0]
        if candidate.workspace_bytes > self._room_bytes:
            raise DoesNotFit(f"its workspace of {candidate.workspace_bytes} bytes does not fit")
        guard = self._workspace + candidate.workspace_bytes
        self._gpu.fill(self._workspace, POISON, candidate.workspace_bytes)
        self._gpu.fill(guard, GUARD, GUARD_BYTES)
        self._poison(at)
        call = self._prepare(candidate, at)
        once_us = self._gpu.times_us(call.enqueue, 1)[0]  # outside a capture, which does not allow kernels to be loaded
        wrong, error = self._checker.wrong(candidate, at)
        if not wrong and (self._gpu.download(guard, GUARD_BYTES) != GUARD).any():
            wrong = "it writes beyond its workspace"
        if wrong:
            return Attempt(offer, 0.0, error, wrong)
        if hopeless_us < once_us < hopeless_us + LOADING_US:
            once_us = self._gpu.times_us(call.enqueue, 1)[0]
        if once_us > hopeless_us:
            return Attempt(offer, once_us, error, hopeless=True)
        return Attempt(offer, self._clock.once_us(call.enqueue), error)

    @contextmanager
    def _failing(self) -> Generator[None, None, None]:
        try:
            yield
        except self._gpu.failures as error:
            raise GpuFailed(str(error)) from error

    def _poison(self, at: Pointers) -> None:
        for number, (address, tensor) in enumerate(zip(at.outputs, self._request.outputs, strict=True)):
            if number not in self._stand.shared:
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
        return self._stand.library.prepare(candidate, self._request, at.addresses, self._workspace, accumulate)

    def _at(self, candidate: Candidate) -> list[Pointers]:
        known = self._sets.get(candidate.layouts)
        if known is None:
            known = self._sets[candidate.layouts] = self._stand.buffers.sets(self._request, candidate.layouts)
        return known

    def time(self, attempt: Attempt, budget_us: float, accumulate: bool = False) -> Times:
        candidate = attempt.offer.candidate
        with self._failing():
            calls = [self._prepare(candidate, at, accumulate).enqueue for at in self._at(candidate)]
            return self._clock.times(calls, attempt.once_us, budget_us)
