"""Whether the kernels that a plan names exist, take the operands that they are given, and have enough workspace.

What a kernel takes its provider declares (`Provider.accepts`), which the search reads, too; the plan itself is no
source for it. For the verifier only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from mbc.errors import MbcError
from mbc.hardware.spec import DeviceSpec, spec_like
from mbc.ir.graph import Operation
from mbc.kernels import PROVIDERS
from mbc.kernels.base import Acceptance, Call, Provider
from mbc.kernels.interpreter import INTERPRETER
from mbc.kernels.nccl import is_bucket
from mbc.plan.kernel_call import call_of
from mbc.plan.model import Access, Kernel, Launch, Mode, Plan, aligned

# Workspace in bytes with which a call of a provider was measured; None where that is not known.
MeasuredBytes = Callable[[str, Call], int | None]
KNOWN_PROVIDERS: Sequence[Provider] = (*PROVIDERS, INTERPRETER)
ALIGNMENT_BYTES = 16  # of operands that kernels load by vectors
_REMEDY = "this plan is not what mbc writes for its GPU: compile the source again"


def not_measured(provider: str, call: Call) -> int | None:
    """Where there is no profile."""
    return None


@dataclass
class KernelCheck:
    """Of the launches of one plan. `unproved`: how many launches, by provider, have a workspace of which only the
    library on the GPU can say that it is enough."""

    plan: Plan
    measured_bytes: MeasuredBytes
    providers: Sequence[Provider]
    unproved: Counter[str] = field(default_factory=Counter[str])
    _known: dict[tuple[str, Call], Acceptance] = field(default_factory=dict[tuple[str, Call], Acceptance])

    def __post_init__(self) -> None:
        target = self.plan.target
        self._device: DeviceSpec = replace(spec_like(target.gpu, target.architecture), architecture=target.architecture)
        self._providers: Mapping[str, Provider] = {p.name: p for p in self.providers}

    def check(self, launch: Launch, operations: Mapping[str, Operation], place: str) -> None:
        """`operations` of the program by name. MBC133 for a kernel that does not run its launch, MBC134 for too little
        workspace."""
        kernel = launch.work
        assert isinstance(kernel, Kernel)
        called = f"{kernel.provider}/{kernel.name}"
        if kernel.provider not in self._providers:
            _fail("MBC133", f"{place}: there is no provider of kernels called '{kernel.provider}'")
        call = call_of(self.plan, launch, operations)
        accepted = self._accepted(kernel.provider, call)
        if accepted.refusal:
            _fail("MBC133", f"{place}: '{called}' cannot run it: {accepted.refusal}")
        if accepted.workspace_refusal:
            _fail(
                "MBC134",
                f"{place}: {call.workspace_bytes} bytes of workspace for '{called}': {accepted.workspace_refusal}",
            )
        if is_bucket(launch):
            self._check_contiguous(launch.accesses, place)
        if accepted.aligned:
            self._check_aligned(launch.accesses, called, place)
        if not accepted.proved:
            self.unproved[kernel.provider] += 1

    def _accepted(self, provider: str, call: Call) -> Acceptance:
        key = provider, call
        known = self._known.get(key)
        if known is None:
            known = self._providers[provider].accepts(call, self._device)
            if not (known.refusal or known.proved):
                known = self._against_measured(provider, call, known)
            self._known[key] = known
        return known

    def _against_measured(self, provider: str, call: Call, accepted: Acceptance) -> Acceptance:
        needed_bytes = self.measured_bytes(provider, call)
        if needed_bytes is None or accepted.workspace_refusal:
            return accepted
        if call.workspace_bytes < needed_bytes:
            return replace(accepted, workspace_refusal=f"it was measured with {needed_bytes} bytes")
        return replace(accepted, proved=True)

    def _check_contiguous(self, accesses: Sequence[Access], place: str) -> None:
        """The operands of one sum over ranks lie one after another, and each sum in the place of its operand."""
        read = [access.buffer for access in accesses if access.mode is Mode.READ]
        results = (access.buffer for access in accesses if access.mode is not Mode.READ)
        written = [buffer for buffer in results if self.plan.buffers[buffer].value is not None]
        end = self.plan.offsets[read[0]]
        for buffer, result in zip(read, written, strict=True):
            if self.plan.offsets[buffer] != end:
                _fail("MBC133", f"{place}: its operands do not lie one after another, at {self.plan.offsets[buffer]}")
            if self.plan.offsets[result] != end:
                _fail("MBC133", f"{place}: a sum lies at {self.plan.offsets[result]}, not over its operand at {end}")
            end += aligned(self.plan.buffers[buffer].size_bytes)

    def _check_aligned(self, accesses: Sequence[Access], called: str, place: str) -> None:
        for access in accesses:
            buffer = self.plan.buffers[access.buffer]
            row_bytes = buffer.size_bytes // buffer.rows.count
            start = self.plan.offsets[access.buffer] + (access.rows.start - buffer.rows.start) * row_bytes
            if start % ALIGNMENT_BYTES:
                _fail(
                    "MBC133",
                    f"{place}: '{called}' loads {ALIGNMENT_BYTES} bytes at once, but an operand begins at {start}",
                )


def check_sums(accesses: Sequence[Access], place: str) -> None:
    """A kernel overwrites all of its reductions or accumulates into all of them: `accesses` are those to reductions."""
    if len({access.mode for access in accesses}) > 1:
        _fail("MBC123", f"{place}: it adds to some of its sums and overwrites others")


def _fail(code: str, message: str) -> NoReturn:
    raise MbcError(code, message, _REMEDY)
