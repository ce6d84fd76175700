"""The check that `--micro-batch` is possible: every convolution in kernel calls of the given number of rows."""

from __future__ import annotations

from mbc.errors import MbcError
from mbc.optimize import effort
from mbc.optimize.candidates.table import MICRO_BATCH_ALIGNMENT_BYTES, CandidateTable


def check_micro_batch(table: CandidateTable) -> None:
    """Raise MBC205 unless the given micro-batches are possible.

    They must not have too many rows, nor too few, and must start at addresses that kernels accept.

    Raises:
        MbcError: MBC205, with the operation that cannot be divided.
    """
    rows, graph = table.rules.micro_batch, table.graph
    if rows > graph.batch:
        raise MbcError(
            "MBC205",
            f"--micro-batch {rows} is more than the mini-batch of {graph.batch} rows",
            f"give at most {graph.batch}, or a larger batch (--set batch=N)",
        )
    if rows in (0, graph.batch):
        return
    if rows * effort.MAX_MICRO_BATCHES < graph.batch:
        raise MbcError(
            "MBC205",
            f"--micro-batch {rows} makes {-(-graph.batch // rows)} calls of one convolution; at most "
            f"{effort.MAX_MICRO_BATCHES} are possible",
            f"give at least {-(-graph.batch // effort.MAX_MICRO_BATCHES)}",
        )
    unaligned = [(o, table.aligned_rows(o)) for o in graph.train if table.divisible(o)]
    unaligned = [(operation, least) for operation, least in unaligned if rows % least]
    if not unaligned:
        return
    operation, least = unaligned[0]
    more = f" and {len(unaligned) - 1} more" if len(unaligned) > 1 else ""
    # All numbers are powers of two, so a multiple of the largest suits all of them.
    suits = max(least for _, least in unaligned)
    raise MbcError(
        "MBC205",
        f"--micro-batch {rows} cannot divide '{operation.name}'{more}: every micro-batch must start at a multiple of "
        f"{MICRO_BATCH_ALIGNMENT_BYTES} bytes; in {graph.precision} this operation needs multiples of {least} rows",
        f"give a multiple of {suits}"
        if suits < graph.batch
        else f"omit --micro-batch: no division of {graph.batch} rows meets this",
        operation.span,
    )
