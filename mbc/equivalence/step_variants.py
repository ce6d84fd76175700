"""Variants of one network that must give the same step, and the operations in which they differ."""

from __future__ import annotations

from dataclasses import replace

from mbc.ir.graph import TrainingGraph
from mbc.kernels.base import Request
from mbc.kernels.convolution_shapes import shapes_of
from mbc.options import UNLIMITED_BYTES, Options, Policy
from mbc.plan.model import Plan
from mbc.plan.summary import OperationSummary, summarise

# Settings that leave the gradient of the first step in the optimizer's state.
_SHOWN = (
    ("train.optimizer", "sgd(momentum=0.9)"),
    ("train.groups", "none"),
    ("train.clip_norm", "none"),
    ("train.clip_value", "none"),
    ("train.ema", "none"),
    ("train.accumulate", "1"),
)
_ANY_MEMORY = ("memory.device", "auto")

MOST_FLOAT64_PRODUCTS = 3e11  # a few minutes of NumPy on two cores, less on the host of a GPU
MOST_FLOAT64_BYTES = 8 << 30


def divided(options: Options) -> Options:
    """Return the options with an optimizer that leaves the gradients in its state."""
    return _with(options, *_SHOWN)


def undivided(options: Options) -> Options:
    """Return the options for each operation in one call, with the same workspace limits.

    The memory is unlimited, because a budget that makes divisions necessary has no undivided plan.
    """
    whole = replace(options, policy=Policy.UNDIVIDED, micro_batch=0)
    return _with(replace(whole, overrides=replace(whole.overrides, device_bytes=None)), *_SHOWN, _ANY_MEMORY)


def in_float64(options: Options) -> Options:
    """Return the options for the undivided step in float64, for the interpreter."""
    plain = replace(
        undivided(options), workspace_limit_bytes=UNLIMITED_BYTES, workspace_total_bytes=UNLIMITED_BYTES, providers=()
    )
    return _with(plain, ("train.precision", "fp64"))


def _with(options: Options, *settings: tuple[str, str]) -> Options:
    return replace(options, settings=(*options.settings, *settings))


def divisions(plan: Plan) -> tuple[OperationSummary, ...]:
    """Return the operations of the training step and of inference that run as several launches, in order."""
    both = (summary for program in (plan.train, plan.infer) for summary in summarise(plan, program))
    return tuple(summary for summary in both if len(summary.micro_batches) > 1)


def float64_is_cheap(graph: TrainingGraph, arena_bytes: int) -> bool:
    """Return whether NumPy runs this step within minutes; `arena_bytes` is the arena of any plan of the step."""
    return convolution_products(graph) <= MOST_FLOAT64_PRODUCTS and 2 * arena_bytes <= MOST_FLOAT64_BYTES


def convolution_products(graph: TrainingGraph) -> int:
    """Return the number of multiplications of all convolutions of one step."""
    total = 0
    for operation in graph.train:
        inputs, outputs = (
            tuple(graph.values[name].type for name in names) for names in (operation.inputs, operation.outputs)
        )
        shapes = shapes_of(Request(operation.kind, operation.attributes, inputs, outputs, graph.precision))
        total += shapes.operations // 2 if shapes is not None else 0
    return total
