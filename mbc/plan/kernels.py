"""Checks that the kernels of a plan exist, take the operands that they are given, and have enough workspace.

The provider of a kernel declares the operands that the kernel takes (`Provider.accepts`), and the search reads that
declaration, too. The check does not rely on the plan itself. Used by the verifier only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from mbc.errors import MbcError
from mbc.hardware.spec import DeviceSpec
from mbc.hardware.streams import aligned
from mbc.ir.graph import Operation
from mbc.kernels.base import Acceptance, Call, Provider
from mbc.kernels.interpreter import INTERPRETER
from mbc.kernels.providers import PROVIDERS
from mbc.plan.collectives import is_bucket
from mbc.plan.kernel_call import call_of
from mbc.plan.model import Access, Kernel, Launch, Mode, Plan

# Returns the workspace in bytes with which a call of a provider was measured; None if no measurement exists.
MeasuredBytes = Callable[[str, Call], int | None]
KNOWN_PROVIDERS: Sequence[Provider] = (*PROVIDERS, INTERPRETER)
ALIGNMENT_BYTES = 16  # operands that kernels load as vectors
_REMEDY = "this plan is not what mbc writes for its GPU: compile the source again"


def not_measured(provider: str, call: Call) -> int | None:
    """Return None: there is no profile with measured workspace."""
    return None


@dataclass
class KernelCheck:
    """The check of all launches of one plan.

    Attributes:
        plan: The plan.
        measured_bytes: Workspace with which a call was measured.
        providers: Providers of the kernels that exist.
        unproved: By provider, the number of launches whose workspace only the library on the GPU can judge.
    """

    plan: Plan
    measured_bytes: MeasuredBytes
    providers: Sequence[Provider]
    unproved: Counter[str] = field(default_factory=Counter[str])
    _acceptances: dict[tuple[str, Call], Acceptance] = field(default_factory=dict[tuple[str, Call], Acceptance])

    def __post_init__(self) -> None:
        """Look up the GPU of the plan and the providers by name."""
        target = self.plan.target
        self._device: DeviceSpec = replace(target.device, architecture=target.architecture)
        self._providers: Mapping[str, Provider] = {p.name: p for p in self.providers}

    def check(self, launch: Launch, operations: Mapping[str, Operation], place: str) -> None:
        """Check the kernel of one launch.

        Args:
            launch: The launch.
            operations: The operations of its program by name.
            place: The launch, as a message names it.

        Raises:
            MbcError: MBC133 for a kernel that cannot run its launch, MBC134 for too little workspace.
        """
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
        acceptance = self._acceptances.get(key)
        if acceptance is None:
            acceptance = self._providers[provider].accepts(call, self._device)
            if not (acceptance.refusal or acceptance.proved):
                acceptance = self._against_measured(provider, call, acceptance)
            self._acceptances[key] = acceptance
        return acceptance

    def _against_measured(self, provider: str, call: Call, accepted: Acceptance) -> Acceptance:
        needed_bytes = self.measured_bytes(provider, call)
        if needed_bytes is None or accepted.workspace_refusal:
            return accepted
        if call.workspace_bytes < needed_bytes:
            return replace(accepted, workspace_refusal=f"it was measured with {needed_bytes} bytes")
        return replace(accepted, proved=True)

    def _check_contiguous(self, accesses: Sequence[Access], place: str) -> None:
        """Check that the operands of an all-reduce are contiguous, and that each result overwrites its operand."""
        read = [access.buffer for access in accesses if access.mode is Mode.READ]
        results = (access.buffer for access in accesses if access.mode is not Mode.READ)
        written = [buffer for buffer in results if self.plan.buffers[buffer].value is not None]
        end = self.plan.offsets[read[0]]
        for buffer, result in zip(read, written, strict=True):
            if self.plan.offsets[buffer] != end:
                _fail("MBC133", f"{place}: its operands are not contiguous at {self.plan.offsets[buffer]}")
            if self.plan.offsets[result] != end:
                _fail(
                    "MBC133", f"{place}: a sum is at {self.plan.offsets[result]}, not in place of its operand at {end}"
                )
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
    """Check that a kernel overwrites all of its reductions, or accumulates into all of them.

    Args:
        accesses: The accesses to the reductions.
        place: The launch, as a message names it.

    Raises:
        MbcError: MBC123 otherwise.
    """
    if len({access.mode for access in accesses}) > 1:
        _fail("MBC123", f"{place}: it adds to some of its sums and overwrites others")


def _fail(code: str, message: str) -> NoReturn:
    raise MbcError(code, message, _REMEDY)
