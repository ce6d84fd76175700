"""Constraints of a search, from the source and the options of a compilation."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from mbc.errors import MbcError
from mbc.frontend.lower import Lowered
from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.hardware.target import free_bytes, free_host_bytes, is_here
from mbc.ir.types import Layout, Precision
from mbc.kernels.base import Provider
from mbc.kernels.interpreter import INTERPRETER
from mbc.kernels.providers import PROVIDERS
from mbc.optimize.candidates.user_rules import Rules
from mbc.optimize.search.limits import Limits
from mbc.options import TECHNIQUES, UNLIMITED_BYTES, Options, Policy
from mbc.plan.model import Plan
from mbc.units import UNIT_BYTES, show_distinct

# Judgement: warn where matrix products in 16 bits have at least this many times the peak. GeForce cards have 2 times.
COSTLY_RATIO = 1.9
# Judgement: a desktop with a browser takes up to this much of a GPU's memory.
RESERVED_FOR_DISPLAY_BYTES = 10**9


@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints of a search.

    `providers` have kernels in the precision. `rules` restrict the kernels and the division of operations. `limits`
    restrict memory.
    """

    providers: tuple[Provider, ...]
    rules: Rules
    limits: Limits


def constraints_of(lowered: Lowered, device: DeviceSpec, options: Options) -> Constraints:
    """Return the constraints of a compilation. For memory that the source leaves to `auto`, take the free memory.

    A RuntimeWarning reports a precision without tensor cores, and a budget that exceeds the device's memory.

    Raises:
        MbcError: MBC206, `without` names an unknown technique.
    """
    if unknown := sorted(options.without.difference(TECHNIQUES)):
        raise MbcError(
            "MBC206", f"there is no technique '{unknown[0]}' to leave out", f"name some of {', '.join(TECHNIQUES)}"
        )
    on_cpu = not lowered.precision.runs_on_gpus
    if costly := _costly_precision(device, lowered.precision, lowered.allow_emulated_fp32):
        warnings.warn(costly, RuntimeWarning, stacklevel=2)
    policy = Policy.UNDIVIDED if "micro_batches" in options.without else options.policy
    rules = Rules(
        policy, lowered.deterministic, options.providers, options.micro_batch, lowered.allow_emulated_fp32,
        state_layouts=tuple((name, Layout(layout)) for name, layout in options.state_layouts),
    )  # fmt: skip
    # All ranks of the machine share the memory that may be pinned.
    modules = min(options.gpus, options.gpus_per_node or options.gpus)
    host_bytes = free_host_bytes(device, options.gpu, modules) if lowered.host_bytes is None else lowered.host_bytes
    budget_bytes = lowered.device_bytes or free_bytes(device, options.gpu)
    if device.memory_bytes < budget_bytes < UNLIMITED_BYTES and not on_cpu:
        memory, budget = show_distinct(device.memory_bytes, budget_bytes)
        warnings.warn(
            f"memory.device = {budget} is more than the {memory} of the {device.name}: a plan that "
            "needs more than the GPU has cannot be loaded on it",
            RuntimeWarning,
            stacklevel=2,
        )
    limits = Limits(
        budget_bytes, options.workspace_limit_bytes, options.workspace_total_bytes, host_bytes, lowered.peer_bytes,
        options.without, options.slowest_us,
    )  # fmt: skip
    return Constraints((INTERPRETER,) if on_cpu else PROVIDERS, rules, limits)


def _costly_precision(device: DeviceSpec, precision: Precision, allow_emulated_fp32: bool) -> str:
    """Say how much faster the GPU is in 16 bits if products in `precision` use no tensor cores; empty if they do.

    For fp32 the text is also empty if 16 bits are hardly faster.
    """
    name, half_precision = f"{device.name} ({device.architecture})", "bf16" if device.has_bf16_and_tf32 else "fp16"
    ratio, remedy = device.fp16_tflops / device.fp32_tflops, f"(--set train.precision={half_precision})"
    faster = f"{half_precision} has {ratio:.1f} times the peak of matrix products and values of half the bytes {remedy}"
    if precision is Precision.FP32:  # possible on tensor cores by emulation, which the user may forbid
        is_slow = ratio >= COSTLY_RATIO and not (allow_emulated_fp32 and device.has(Instruction.WGMMA))
        return f"fp32 runs mostly without tensor cores on {name}: {faster}" if is_slow else ""
    if precision not in (Precision.BF16, Precision.TF32) or device.has(Instruction.MMA_SYNC):
        return ""
    reason = f"{name} has no tensor cores for {precision}"
    if precision is Precision.TF32:
        reason += ", so products run in fp32"
        return f"{reason}: {faster}" if ratio >= COSTLY_RATIO else reason
    cost = f"a step may take tens of times as long as in fp16 {remedy}"
    return f"{reason}, and cuDNN and cuBLASLt do not compute in bf16 on it: {cost}"


def warn_without_room(plan: Plan, gpu: str) -> None:
    """Warn where a plan leaves less than 1 GB of the GPU's memory and the driver did not report how much is free.

    Args:
        plan: A plan for one GPU.
        gpu: The GPU that was asked for, as in `Options`.
    """
    device, overhead_bytes = plan.target.device, plan.predictions.overhead_bytes
    needed_bytes = plan.predictions.arena_bytes + overhead_bytes
    if plan.budget_bytes != device.memory_bytes or needed_bytes + RESERVED_FOR_DISPLAY_BYTES <= device.memory_bytes:
        return
    if plan.is_timed and not is_here(device, gpu):
        recommended_gib = (device.memory_bytes - RESERVED_FOR_DISPLAY_BYTES) * 10 // UNIT_BYTES["GiB"] / 10
        may_plan = recommended_gib * UNIT_BYTES["GiB"] > overhead_bytes
        warnings.warn(
            f"the budget is all memory of the {device.name}, and the plan leaves less than 1 GB of it to a "
            "display and other programs"
            f"{f': memory.device={recommended_gib:.1f}GiB leaves them 1 GB' if may_plan else ''}",
            RuntimeWarning,
            stacklevel=2,
        )
