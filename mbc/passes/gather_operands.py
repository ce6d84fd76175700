"""Gradients of weights from the rows of all ranks, where gathering these sends far less than summing the gradients.

The gradient of a fully connected layer's weight, dy^T x, has inputs x outputs elements; its operands have rows x
(inputs + outputs). With few rows the operands of all ranks are much smaller: VGG-16's first fully connected layer, with
64 rows on each of two ranks, has 392 MiB of gradient and 7 MiB of operands. Then every rank computes the sum over all
ranks itself, which is known as sufficient factor broadcasting (Xie et al., "Distributed machine learning via
sufficient factor broadcasting", 2014; chosen by layer in Zhang et al., "Poseidon", 2017). Each rank multiplies as many
times more as there are ranks, but with few rows a gradient takes only as long as writing its elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mbc.ir.graph import Operation, Ranks, Role, Value
from mbc.ir.types import DType, TensorType
from mbc.ops import KINDS
from mbc.ops.collective import AllGather, AllReduce, in_words
from mbc.passes.concat_statistics import unused_name

# Largest share of an all-reduce's bytes that gathering may send.
MOST_SENT = 1 / 4
# Smallest gradient whose all-reduce costs more than one more call of NCCL.
LEAST_BYTES = 16 << 20
# Most rows of all ranks with which the GEMM takes hardly longer than writing its result. On an H100 both take equally
# long at 400 rows in 16 bits, and at 40 in fp32, with and without emulation.
MOST_ROWS, MOST_ROWS_FP32 = 512, 64
# The gradient is placed after this many further GEMMs and convolutions, during which its operands are sent.
GEMMS_TO_OVERLAP = 2


def gather_operands(operations: Sequence[Operation], values: dict[str, Value], ranks: Ranks | None) -> list[Operation]:
    """Return the operations with some sums of weights' gradients over ranks as gradients of gathered rows.

    This needs ranks that all run one graph. NCCL gathers equally much from each rank, and kernels of another plan would
    add in another order, so that the ranks' weights would diverge. The sums keep their names.

    Args:
        operations: The operations of a step.
        values: Gets `<operand>.rows`.
        ranks: The ranks; None for one GPU.
    """
    if ranks is None or len(ranks.members) < ranks.size:
        return [*operations]
    sums = _sums(operations, values, ranks)
    written: list[Operation] = []
    waiting: list[tuple[Operation, int]] = []  # gradients, and the number of GEMMs still to come before each
    for op in operations:
        if op.name in sums:
            own, total = sums[op.name]
            if op is total:
                continue
            gather, gradient = _gathered(own, total, values, ranks)
            written.append(gather)
            waiting.append((gradient, GEMMS_TO_OVERLAP))
            continue
        due = [gradient for gradient, left in waiting if left == 0 or not set(op.inputs).isdisjoint(gradient.outputs)]
        written += due
        gemm = KINDS[op.kind].flops is not None
        waiting = [(gradient, left - gemm) for gradient, left in waiting if gradient not in due]
        written.append(op)
    return written + [gradient for gradient, _ in waiting]


def _sums(
    operations: Sequence[Operation], values: dict[str, Value], ranks: Ranks
) -> dict[str, tuple[Operation, Operation]]:
    """Return weights' gradients that are better gathered, with their sums over ranks, by the name of either."""
    makers = {output: op for op in operations for output in op.outputs}
    reads = Counter(value for op in operations for value in op.inputs)
    sums: dict[str, tuple[Operation, Operation]] = {}
    for op in operations:
        if not isinstance(op.attributes, AllReduce):
            continue
        gradient = makers[op.inputs[0]]
        if gradient.kind == "linear_backward_filter" and reads[gradient.outputs[0]] == 1:
            operands = [values[name].type for name in gradient.inputs]
            if _is_worth_it(operands, values[gradient.outputs[0]].type, ranks.size):
                sums[gradient.name] = sums[op.name] = gradient, op
    return sums


def _is_worth_it(operands: Sequence[TensorType], gradient: TensorType, ranks: int) -> bool:
    """Return whether gathering the operands is better than an all-reduce of the gradient.

    An all-reduce is a reduce-scatter and an all-gather, so it sends twice as much as gathering equally many bytes.
    """
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
        name = unused_name(f"{operand}.rows", values)
        kind = values[operand].type
        rows = TensorType((ranks.size * kind.shape[0], *kind.shape[1:]), kind.dtype)
        values[name] = Value(name, rows, Role.INTERMEDIATE, span=values[operand].span)
        names.append(name)
    gather = Operation(
        f"{gradient.name}.gather_rows", "gather_rows", gradient.inputs, tuple(names), AllGather(ranks.size),
        gradient.span,
    )  # fmt: skip
    return gather, replace(gradient, inputs=tuple(names), outputs=total.outputs)
