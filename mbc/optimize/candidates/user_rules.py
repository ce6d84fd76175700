"""Which candidates a plan may use: by what the user asks for, not by time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from mbc.errors import MbcError
from mbc.hardware.spec import DeviceSpec
from mbc.ir.graph import Operation
from mbc.ir.types import Layout, Precision
from mbc.kernels.base import Candidate, Provider, Request
from mbc.kernels.cuda import bitwise_equal_to, emulates_fp32
from mbc.kernels.nccl import NCCL
from mbc.options import Policy


@dataclass(frozen=True, slots=True)
class Rules:
    """Which candidates may be used, and how operations may be divided.

    `providers`: their names (none: all). `micro_batch`: rows of every call of a convolution, 0 to choose them.
    `emulated_fp32`: whether a product of fp32 may be several of fp16 or tf32. `collectives`: the
    operations of each launch between ranks, in order, where another rank's plan has decided it (empty: choose), by how
    many thread blocks (`ctas`), and how the operand of each sum lies (`sum_layouts`).
    """

    policy: Policy = Policy.UNDIVIDED
    deterministic: bool = False
    providers: tuple[str, ...] = ()
    micro_batch: int = 0
    emulated_fp32: bool = True
    collectives: tuple[tuple[str, ...], ...] = ()
    ctas: int = 0
    sum_layouts: tuple[tuple[str, Layout], ...] = ()

    def allow(self, provider: str) -> bool:
        """Whether kernels of a provider may be used; there is one for sums over ranks only."""
        return not self.providers or provider in self.providers or provider == NCCL.name

    def admit(self, candidate: Candidate, precision: Precision) -> bool:
        return (
            self.allow(candidate.provider)
            and (candidate.deterministic or not self.deterministic)
            and (self.emulated_fp32 or not emulates_fp32(candidate.provider, candidate.name, precision))
        )

    def admitted(
        self, candidates: Iterable[Candidate], precision: Precision, remat_kernels: Collection[str] = ()
    ) -> tuple[Candidate, ...]:
        """Those that may be used, and that give the same bits as kernels that recompute their outputs."""
        admitted = (c for c in candidates if self.admit(c, precision))
        return tuple(c for c in admitted if all(bitwise_equal_to(kernel, c.name) for kernel in remat_kernels))

    def excluding(self) -> list[str]:
        """What leaves candidates out, as the user wrote it."""
        found = [f"policy {self.policy}"]
        found += ["deterministic = true"] if self.deterministic else []
        found += [] if self.emulated_fp32 else ["allow_emulated_fp32 = false"]
        return found + ([provider_options(self.providers)] if self.providers else [])


def provider_options(providers: Sequence[str]) -> str:
    """As the command line takes them: one name an option."""
    return " ".join(f"--provider {name}" for name in providers)


def no_candidate(
    rules: Rules, providers: Sequence[Provider], device: DeviceSpec, operation: Operation, request: Request
) -> MbcError:
    """MBC202 where all kernels of an operation that the chosen providers have are ruled out, since their results differ
    from run to run; else MBC200. Emulated fp32 is never what is lacking: mbc has another kernel for whatever it runs.
    """
    able = [(provider.name, candidate) for provider in providers for candidate in provider.candidates(request, device)]
    inputs = ", ".join(map(str, request.inputs))
    if any(not rules.providers or name in rules.providers for name, _ in able):
        return MbcError(
            "MBC202",
            f"'{operation.name}' ({operation.kind} of {inputs}) has no deterministic kernel",
            "set deterministic = false",
            operation.span,
        )
    only = f" among {', '.join(rules.providers)}" if rules.providers else ""
    remedy = "choose another precision, or write the operation with other settings"
    named = [name for name, candidate in able if candidate.deterministic or not rules.deterministic]
    if named:  # the last is mbc itself, which has most kinds
        remedy = f"add one that can: {provider_options((*rules.providers, named[-1]))}"
    return MbcError(
        "MBC200",
        f"no kernel{only} can run '{operation.name}' ({operation.kind} of {inputs}) in {request.precision}",
        remedy,
        operation.span,
    )
