"""What a source and the options of a compilation together allow its search."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from mbc.errors import MbcError
from mbc.frontend.lower import Lowered
from mbc.hardware.spec import DeviceSpec
from mbc.hardware.target import free_bytes, free_host_bytes
from mbc.ir.types import Precision
from mbc.kernels import PROVIDERS
from mbc.kernels.base import Provider
from mbc.kernels.interpreter import INTERPRETER
from mbc.optimize.candidates.user_rules import Rules
from mbc.optimize.search.search import Limits
from mbc.options import TECHNIQUES, UNLIMITED_BYTES, Options, Policy
from mbc.units import show_size


@dataclass(frozen=True, slots=True)
class Constraints:
    """`providers`: whose kernels there are in the precision. `rules`: which of them may be used, and how operations may
    be divided. `limits`, `budget_bytes`: of memory."""

    providers: tuple[Provider, ...]
    rules: Rules
    limits: Limits
    budget_bytes: int


def constraints_of(lowered: Lowered, device: DeviceSpec, options: Options) -> Constraints:
    """Where the source leaves memory to `auto`, by what is free now. A warning (RuntimeWarning) says of a budget that
    the device has less. MBC206 where `without` names what is no technique."""
    if unknown := sorted(options.without.difference(TECHNIQUES)):
        raise MbcError(
            "MBC206",
            f"there is no technique '{unknown[0]}' to do without",
            f"name some of {', '.join(TECHNIQUES)}",
        )
    on_cpu = lowered.precision is Precision.FP64
    policy = Policy.UNDIVIDED if "micro_batches" in options.without else options.policy
    rules = Rules(policy, lowered.deterministic, options.providers, options.micro_batch, lowered.allow_emulated_fp32)
    # What may be pinned is for all ranks of the machine.
    modules = min(options.gpus, options.gpus_per_node or options.gpus)
    host_bytes = free_host_bytes(device, options.gpu, modules) if lowered.host_bytes is None else lowered.host_bytes
    limits = Limits(
        options.workspace_limit_bytes, options.workspace_total_bytes, options.without, host_bytes, lowered.peer_bytes
    )
    budget_bytes = lowered.device_bytes or free_bytes(device, options.gpu)
    if device.memory_bytes < budget_bytes < UNLIMITED_BYTES and not on_cpu:
        warnings.warn(
            f"memory.device = {show_size(budget_bytes)} is more than the {device.name} has, "
            f"{show_size(device.memory_bytes)}: a plan that takes more than that cannot be loaded there",
            RuntimeWarning,
            stacklevel=2,
        )
    return Constraints((INTERPRETER,) if on_cpu else PROVIDERS, rules, limits, budget_bytes)
