"""Variants of one network that must give the same step, and where they differ."""

from __future__ import annotations

from dataclasses import replace

from mbc.ir.graph import TrainingGraph
from mbc.kernels.base import Request
from mbc.kernels.convolution_shapes import shapes_of
from mbc.options import Options, Policy
from mbc.plan.model import Plan
from mbc.plan.summary import OperationSummary, summarise

# Leaves the gradient of the first step in the optimizer's state, whatever the network is trained with.
_SHOWN = (
    ("train.optimizer", "sgd(momentum=0.9)"),
    ("train.groups", "none"),
    ("train.clip_norm", "none"),
    ("train.clip_value", "none"),
    ("train.ema", "none"),
    ("train.accumulate", "1"),
)
_ANY_MEMORY = ("memory.device", "auto")

MOST_FLOAT64_PRODUCTS = 3e11  # some minutes of NumPy on two cores, less on the host of a GPU
MOST_FLOAT64_BYTES = 8 << 30


def divided(options: Options) -> Options:
    """As the options say, with an optimizer that shows the gradients."""
    return _with(options, *_SHOWN)


def undivided(options: Options) -> Options:
    """Every operation in one call, under the same limits of workspace; in as much memory as there is, because a budget
    that makes divisions necessary has no undivided plan."""
    whole = replace(options, policy=Policy.UNDIVIDED, micro_batch=0)
    return _with(whole, *_SHOWN, _ANY_MEMORY)


def in_float64(options: Options) -> Options:
    """The undivided step in float64, for the interpreter."""
    plain = replace(undivided(options), workspace_limit_bytes=None, workspace_total_bytes=None, providers=())
    return _with(plain, ("train.precision", "fp64"))


def _with(options: Options, *settings: tuple[str, str]) -> Options:
    return replace(options, settings=(*options.settings, *settings))


def divisions(plan: Plan) -> tuple[OperationSummary, ...]:
    """The operations of the training step and of inference that run as several launches, in their order."""
    both = (summary for program in (plan.train, plan.infer) for summary in summarise(plan, program))
    return tuple(summary for summary in both if len(summary.micro_batches) > 1)


def float64_is_cheap(graph: TrainingGraph, arena_bytes: int) -> bool:
    """Whether NumPy runs this step within minutes. `arena_bytes`: of any plan of it, in any precision."""
    return convolution_products(graph) <= MOST_FLOAT64_PRODUCTS and 2 * arena_bytes <= MOST_FLOAT64_BYTES


def convolution_products(graph: TrainingGraph) -> int:
    """Multiplications of all convolutions of one step."""
    total = 0
    for operation in graph.train:
        inputs, outputs = (
            tuple(graph.values[name].type for name in names) for names in (operation.inputs, operation.outputs)
        )
        shapes = shapes_of(Request(operation.kind, operation.attributes, inputs, outputs, graph.precision))
        total += shapes.operations // 2 if shapes is not None else 0
    return total
