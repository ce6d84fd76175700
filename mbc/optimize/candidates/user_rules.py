"""The candidates that a plan may use, by the user's settings rather than by time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from mbc.errors import MbcError
from mbc.hardware.spec import DeviceSpec
from mbc.ir.graph import Operation
from mbc.ir.types import Layout, Precision
from mbc.kernels.base import Candidate, Provider, Request
from mbc.kernels.cuda import OWN, bitwise_equal_to, emulates_fp32, uses_tensor_cores
from mbc.kernels.nccl import NCCL
from mbc.options import OWN_FIRST, Policy


@dataclass(frozen=True, slots=True)
class Rules:
    """The user's rules: which candidates may be used, and how operations may be divided.

    Attributes:
        policy: Sizes of micro-batches that may be used.
        deterministic: Whether only kernels with the same result in every run may be used.
        providers: Names of the providers that may be used; empty: all. OWN_FIRST among them: all, but none of a
            library where one of mbc's own kernels runs on tensor cores.
        micro_batch: Rows of every call of a convolution; 0 lets mbc choose them.
        emulated_fp32: Whether an fp32 product may be computed by several of fp16 or tf32.
        collectives: Operations of each launch between ranks, in order, if another rank's plan has decided them; empty
            lets mbc choose.
        ctas: Thread blocks of each such launch.
        sum_layouts: Layout of the operand of each sum over ranks, by the operation's name.
        state_layouts: Layouts of states by name, where they are decided before planning; states that are not named are
            then channels first. Empty: the planner chooses all layouts.
    """

    policy: Policy = Policy.UNDIVIDED
    deterministic: bool = False
    providers: tuple[str, ...] = ()
    micro_batch: int = 0
    emulated_fp32: bool = True
    collectives: tuple[tuple[str, ...], ...] = ()
    ctas: int = 0
    sum_layouts: tuple[tuple[str, Layout], ...] = ()
    state_layouts: tuple[tuple[str, Layout], ...] = ()

    def allow(self, provider: str) -> bool:
        """Return whether kernels of a provider may be used.

        NCCL is always allowed: it alone sums over ranks.
        """
        only = set(self.providers) - {OWN_FIRST}
        return not only or provider in only or provider == NCCL.name

    def admit(self, candidate: Candidate, precision: Precision) -> bool:
        """Return whether a candidate may be used in this precision."""
        return (
            self.allow(candidate.provider)
            and (candidate.deterministic or not self.deterministic)
            and (self.emulated_fp32 or not emulates_fp32(candidate.provider, candidate.name, precision))
        )

    def admitted(
        self, candidates: Iterable[Candidate], precision: Precision, remat_kernels: Collection[str] = ()
    ) -> tuple[Candidate, ...]:
        """Return the candidates that may be used, and that give the same bits as the kernels `remat_kernels`."""
        admitted = [c for c in candidates if self.admit(c, precision)]
        if OWN_FIRST in self.providers:
            admitted = [c for c in admitted if c.provider == OWN.name and uses_tensor_cores(c.name)] or admitted
        return tuple(c for c in admitted if all(bitwise_equal_to(kernel, c.name) for kernel in remat_kernels))

    def excluding(self) -> list[str]:
        """Return the settings that exclude candidates, in the user's spelling."""
        settings = [f"policy {self.policy}"]
        settings += ["deterministic = true"] if self.deterministic else []
        settings += [] if self.emulated_fp32 else ["allow_emulated_fp32 = false"]
        return settings + ([provider_options(self.providers)] if self.providers else [])


def provider_options(providers: Sequence[str]) -> str:
    """Return options of the command line that name these providers, one for each."""
    return " ".join(f"--provider {name}" for name in providers)


def no_candidate(
    rules: Rules, providers: Sequence[Provider], device: DeviceSpec, operation: Operation, request: Request
) -> MbcError:
    """Return MBC202 or MBC200, for an operation that no candidate can run.

    MBC202: the chosen providers have kernels, but their results differ from run to run. MBC200: they have none. The
    rule on emulated fp32 is never the cause: mbc has another kernel for every operation that an emulated one runs.
    """
    able = [(provider.name, candidate) for provider in providers for candidate in provider.candidates(request, device)]
    inputs = ", ".join(map(str, request.inputs))
    if any(rules.allow(name) for name, _ in able):
        return MbcError(
            "MBC202",
            f"'{operation.name}' ({operation.kind} of {inputs}) has no deterministic kernel",
            "set deterministic = false",
            operation.span,
        )
    only = f" among {', '.join(rules.providers)}" if rules.providers else ""
    remedy = "choose another precision, or write the operation with other settings"
    named = [name for name, candidate in able if candidate.deterministic or not rules.deterministic]
    if named:  # mbc's own kernels are last; they cover most kinds of operations
        remedy = f"add a provider that can: {provider_options((*rules.providers, named[-1]))}"
    return MbcError(
        "MBC200",
        f"no kernel{only} can run '{operation.name}' ({operation.kind} of {inputs}) in {request.precision}",
        remedy,
        operation.span,
    )
