"""Weights' gradients from the rows of all ranks, where gathering these sends far less than summing the gradients.

The gradient of a fully connected layer's weight, dy^T x, has inputs x outputs elements; its operands have rows x
(inputs + outputs). With few rows the operands of all ranks are much smaller: VGG-16's first fully connected layer, with
64 rows on each of two ranks, has 392 MiB of gradient and 7 MiB of operands. Every rank then computes the sum over all
ranks by itself, which is known as sufficient factor broadcasting (Xie et al., "Distributed machine learning via
sufficient factor broadcasting", 2014; chosen by layer in Zhang et al., "Poseidon", 2017). It multiplies as many times
more as there are ranks, but with few rows a gradient takes as long as its elements take to be written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from mbc.ir.graph import Operation, Ranks, Role, Value
from mbc.ir.types import DType, TensorType
from mbc.ops import KINDS
from mbc.ops.collective import AllGather, AllReduce, in_words

# Gathered where no more than this share of the bytes is sent that an all-reduce sends,
MOST_SENT = 1 / 4
# of a gradient so large that its all-reduce costs more than one more call of NCCL's,
LEAST_BYTES = 16 << 20
# with so few rows of all ranks that its GEMM takes hardly longer than writing it: at 400 rows both take as long on an
# H100, in 16 bits; in fp32 at 40, by what its cores reach without emulation, or with it.
MOST_ROWS, MOST_ROWS_FP32 = 512, 64
# The gradient stands behind so many further GEMMs and convolutions, during which its operands travel.
GEMMS_TO_OVERLAP = 2


def gather_operands(operations: Sequence[Operation], values: dict[str, Value], ranks: Ranks | None) -> list[Operation]:
    """`operations` with some sums over ranks of weights' gradients as gradients of gathered rows, where all ranks run
    one graph: NCCL gathers as much from each, and kernels of another plan would add in another order, so that weights
    of the ranks would drift apart. The sums keep their names; `values` gets `<operand>.rows`."""
    if ranks is None or len(ranks.members) < ranks.size:
        return [*operations]
    sums = _sums(operations, values, ranks)
    found: list[Operation] = []
    waiting: list[tuple[Operation, int]] = []  # gradients, and how many GEMMs are still to come before each
    for op in operations:
        if op.name in sums:
            own, total = sums[op.name]
            if op is total:
                continue
            gather, gradient = _gathered(own, total, values, ranks)
            found.append(gather)
            waiting.append((gradient, GEMMS_TO_OVERLAP))
            continue
        due = [gradient for gradient, left in waiting if left == 0 or not set(op.inputs).isdisjoint(gradient.outputs)]
        found += due
        gemm = KINDS[op.kind].flops is not None
        waiting = [(gradient, left - gemm) for gradient, left in waiting if gradient not in due]
        found.append(op)
    return found + [gradient for gradient, _ in waiting]


def _sums(
    operations: Sequence[Operation], values: dict[str, Value], ranks: Ranks
) -> dict[str, tuple[Operation, Operation]]:
    """By the name of either: a weight's gradient, and its sum over ranks, that are better gathered."""
    makers = {output: op for op in operations for output in op.outputs}
    reads = Counter(value for op in operations for value in op.inputs)
    found: dict[str, tuple[Operation, Operation]] = {}
    for op in operations:
        if not isinstance(op.attributes, AllReduce):
            continue
        made = makers[op.inputs[0]]
        if made.kind == "linear_backward_filter" and reads[made.outputs[0]] == 1:
            operands = [values[name].type for name in made.inputs]
            if _is_worth_it(operands, values[made.outputs[0]].type, ranks.size):
                found[made.name] = found[op.name] = made, op
    return found


def _is_worth_it(operands: Sequence[TensorType], gradient: TensorType, ranks: int) -> bool:
    """An all-reduce is a reduce-scatter and an all-gather, so it sends twice what gathering as many bytes does."""
    rows = ranks * operands[0].shape[0]
    most_rows = MOST_ROWS if operands[0].dtype.size_bytes < DType.FP32.size_bytes else MOST_ROWS_FP32
    gathered_bytes = ranks * sum(operand.size_bytes for operand in operands)
    sends_less = gathered_bytes <= MOST_SENT * 2 * gradient.size_bytes
    return sends_less and gradient.size_bytes >= LEAST_BYTES and rows <= most_rows and in_words(operands)


def _gathered(
    gradient: Operation, total: Operation, values: dict[str, Value], ranks: Ranks
) -> tuple[Operation, Operation]:
    names: list[str] = []
    for operand in gradient.inputs:
        name = _unused(f"{operand}.rows", values)
        kind = values[operand].type
        rows = TensorType((ranks.size * kind.shape[0], *kind.shape[1:]), kind.dtype)
        values[name] = Value(name, rows, Role.INTERMEDIATE, span=values[operand].span)
        names.append(name)
    gather = Operation(
        f"{gradient.name}.gather_rows", "gather_rows", gradient.inputs, tuple(names), AllGather(ranks.size),
        gradient.span,
    )  # fmt: skip
    return gather, replace(gradient, inputs=tuple(names), outputs=total.outputs)


def _unused(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "_"
    return name
