"""Kernels that bind a package to the architecture it was compiled for.

A package has PTX of its own kernels, which the driver compiles for a newer GPU. That does not help a kernel that uses
instructions of one architecture only (PTX of sm_90a is not forward compatible), a kernel that needs more shared memory
than a block of the newer GPU has, or an engine that a library has for one architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mbc.hardware.datasheet import capability_of
from mbc.hardware.spec import spec_like
from mbc.kernels.base import Call, Provider
from mbc.kernels.providers import PROVIDERS
from mbc.plan.kernel_call import call_of
from mbc.plan.model import Kernel, Plan


def is_forward_compatible(architecture: str) -> bool:
    """Return whether newer GPUs can run code for the architecture: not if it names features of one architecture."""
    return architecture[-1] not in "af"


def binding_kernels(plan: Plan, architecture: str, providers: Sequence[Provider] = PROVIDERS) -> tuple[str, ...]:
    """Return the kernels of a plan that run on its GPU but not on a newer one, with the reasons.

    Args:
        plan: The plan.
        architecture: Architecture of the newer GPU.
        providers: Providers of the kernels that exist.
    """
    planned = replace(plan.target.device, architecture=plan.target.architecture)
    newer = spec_like(architecture, architecture)
    of_name = {provider.name: provider for provider in providers}
    is_other_family = capability_of(architecture) // 10 != capability_of(plan.target.architecture) // 10
    reasons: dict[str, str] = {}
    for program, operations in ((plan.train, plan.graph.train), (plan.infer, plan.graph.infer)):
        by_name = {operation.name: operation for operation in operations}
        for launch in program.launches:
            kernel = launch.work
            if not isinstance(kernel, Kernel) or kernel.provider not in of_name:
                continue
            call, provider = call_of(plan, launch, by_name), of_name[kernel.provider]
            refusal = provider.accepts(call, newer).refusal
            if refusal and not provider.accepts(call, planned).refusal:
                reasons.setdefault(f"{kernel.provider}/{kernel.name}", refusal)
            elif is_other_family and _has_engine(call):
                reasons.setdefault(f"{kernel.provider}/{kernel.name}", "its engine was chosen for the planned GPU")
    return tuple(f"{name} ({reason})" for name, reason in reasons.items())


def _has_engine(call: Call) -> bool:
    """Return whether the call names an engine of cuDNN, instead of leaving the choice to cuDNN's heuristics."""
    return int(dict(call.settings).get("engine", -1)) >= 0
