"""The check of plans that share a mini-batch.

All ranks sum the same values in one order, and a sum contains every row of the global mini-batch once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from mbc.errors import MbcError
from mbc.hardware.streams import Stream
from mbc.ir.graph import Operation, Ranks, Role, TrainingGraph
from mbc.kernels.nccl import (
    ALL_GATHER,
    ALL_REDUCE,
    BY_COPIES,
    COLLECTIVES,
    GATHER_PARTS,
    GATHER_ROWS,
    REDUCE_SCATTER,
    SHARDED,
)
from mbc.ops import KINDS
from mbc.ops.batch_normalize import BatchNormalize, BatchNormalizeBackward, CombineStatistics, UpdateRunning
from mbc.ops.collective import AllGather, AllReduce
from mbc.ops.dice import Dice, DiceMeanBackward
from mbc.ops.elementwise_loss import Backward as ElementwiseBackward
from mbc.ops.kl_divergence import KlBackward
from mbc.ops.layerwise import RATIOS
from mbc.ops.loss import CrossEntropyBackward
from mbc.ops.mean_iou import OVERLAP_MEAN
from mbc.ops.shard import UPDATES_OF_PARTS, ReduceScatter
from mbc.ops.soft_cross_entropy import SoftTargetBackward
from mbc.ops.top_k import TopKMean
from mbc.ops.weighted_cross_entropy import WeightedMean, WeightedMeanBackward
from mbc.plan.collectives import ctas_of, is_bucket, is_collective
from mbc.plan.file import dump_plan
from mbc.plan.model import Plan

_ROUNDING = 1e-12
# The only kind that may read the rows of all ranks: it sums over rows and nothing else, hence over ranks.
OF_ROWS = "linear_backward_filter"
_LossGradient = (
    CrossEntropyBackward
    | SoftTargetBackward
    | WeightedMeanBackward
    | KlBackward
    | ElementwiseBackward
    | DiceMeanBackward
)
STATISTICS = ("batch_statistics", "concat_statistics")  # kinds that compute statistics of a rank's rows
OF_SUMS = ("row_reduce_dot", "weighted_sum")  # kinds whose result is equal on all ranks if all operands are
_SAME = (Role.PARAMETER, Role.OPTIMIZER, Role.CONTROL)  # states that are equal on all ranks
_OF_A_STEP = (Role.INTERMEDIATE, Role.GRADIENT)  # values that a rank computes from its own rows unless they are summed
_REMEDY = "mbc never writes such plans for several GPUs: compile the source again"


def verify_rank(plan: Plan) -> None:
    """Check one plan: values that must be equal on all ranks are summed over all ranks once, on the collective stream.

    These values are the gradients, those that decide whether a step counts, and those that the step reports.

    Raises:
        MbcError: MBC135 otherwise; MBC136 for the parts of a sharded optimizer.
    """
    ranks, graph = plan.graph.ranks, plan.graph
    sums = _sums(graph)
    if ranks is None:
        shares = any(op.kind in COLLECTIVES for op in graph.train)
        if shares or any(map(is_collective, (*plan.train.launches, *plan.infer.launches))):
            _fail("it sums over ranks, but there is only one")
        return
    for op in graph.train:
        if isinstance(op.attributes, AllReduce | AllGather | ReduceScatter) and op.attributes.ranks != ranks.size:
            _fail(f"'{op.name}' is for {op.attributes.ranks} ranks, but there are {ranks.size}")
        for name in _must_be_sums(graph, op):
            if name not in sums:
                _fail(f"'{op.name}' reads '{name}', which is not summed over the ranks")
    for name in (graph.loss, *graph.metrics):
        if name not in sums:
            _fail(f"the step reports '{name}', which is not summed over the ranks")
    _check_once(graph, sums)
    _check_shards(graph, ranks)
    _check_statistics(graph, ranks)
    _check_class_weights(graph, ranks)
    for i, launch in enumerate(plan.train.launches):
        if is_collective(launch) is not (launch.stream is Stream.COLLECTIVE):
            _fail(f"launch {i} of train is on the stream '{launch.stream}'")
    if any(map(is_collective, plan.infer.launches)):
        _fail("inference sums over ranks")


def verify_ranks(plans: Sequence[Plan]) -> None:
    """Check the plans of the ranks that share a mini-batch, each of which has been verified alone.

    Raises:
        MbcError: MBC135 unless the plans are of all ranks, run the same collectives in the same order, and weight their
            rows equally.
    """
    shared = [plan.graph.ranks for plan in plans]
    first = shared[0]
    if first is None or any(ranks is None or ranks.rows != first.rows for ranks in shared):
        _fail("they share a mini-batch in different ways")
    members = sorted(rank for ranks in shared if ranks is not None for rank in ranks.members)
    if members != list(range(first.size)):
        _fail(f"they are for the ranks {members}, not for each of {first.size} ranks once")
    for plan in plans[1:]:
        if tuple(_collectives(plan)) != tuple(_collectives(plans[0])):
            _fail(f"rank {_rank(plan)} runs other collectives than rank {_rank(plans[0])}, or in another order")
        for (name, weight), (_, other) in zip(_weights(plan), _weights(plans[0]), strict=True):
            if not math.isclose(weight * plans[0].graph.batch, other * plan.graph.batch, rel_tol=_ROUNDING):
                _fail(f"rank {_rank(plan)} gives the rows of '{name}' another weight than rank {_rank(plans[0])}")


def shared_digest(plan: Plan) -> str:
    """Return a digest that is equal on all ranks that can train together.

    It covers the whole plan if all ranks run one plan, and otherwise the parts that the plans must share.
    """
    ranks = plan.graph.ranks
    if ranks is not None and len(ranks.members) == ranks.size:
        text = dump_plan(replace(plan, settings=()))  # a setting and the same value in the source give equal plans
    else:
        states = [(state, plan.graph.values[state.value].type) for state in plan.graph.states]
        # Backward passes may differ: plans of different GPUs store bit masks, or the values that the masks come from.
        kinds = [(op.name, op.kind) for op in _forward(plan.graph)]
        common = (plan.version, plan.graph.precision, plan.graph.optimizer, states, kinds, [*_collectives(plan)])
        text = repr((None if ranks is None else ranks.rows, common))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _forward(graph: TrainingGraph) -> tuple[Operation, ...]:
    """Return the operations of the step from which its loss and metrics follow."""
    wanted = {graph.loss, *graph.metrics}
    forward: list[Operation] = []
    for op in reversed(graph.train):
        if not wanted.isdisjoint(op.outputs):
            wanted.update(op.inputs)
            forward.append(op)
    return tuple(reversed(forward))


def _sums(graph: TrainingGraph) -> set[str]:
    """Return the values that are sums over all ranks.

    They are results of an all-reduce or of an operation on the rows of all ranks; this rank's parts of such sums; the
    norms of the parts of all ranks; ratios of norms of sums; and squared norms of sums.
    """
    gathered = {output: op for op in graph.train if op.kind == GATHER_ROWS for output in op.outputs}
    norms = {output for op in graph.train if op.kind == "norm" for output in op.outputs}
    sums: set[str] = set()
    for op in graph.train:
        read = [gathered.get(name) for name in op.inputs]
        if op.kind == GATHER_ROWS:
            if not all(graph.values[name].per_sample for name in op.inputs):
                _fail(f"'{op.name}' gathers values that have no rows")
            if graph.ranks is not None and len(graph.ranks.members) < graph.ranks.size:
                _fail(
                    f"'{op.name}' is for ranks that all run one plan: other ranks would sum the rows in another order"
                )
        if any(read):
            first = read[0]
            if op.kind != OF_ROWS or first is None or read != [first, first] or op.inputs != first.outputs:
                _fail(f"'{op.name}' reads rows of all ranks, but only the gradient of a weight may read them")
        if (
            op.kind in (ALL_REDUCE, REDUCE_SCATTER)
            or any(read)
            or (op.kind == ALL_GATHER and norms.issuperset(op.inputs))
            or (op.kind in RATIOS and op.inputs[1] in sums)
            or (op.kind in OF_SUMS and sums.issuperset(op.inputs))
        ):
            sums.update(op.outputs)
    return sums


def _must_be_sums(graph: TrainingGraph, op: Operation) -> Iterator[str]:
    """Yield the operands of `op` that must be equal on all ranks: those that change a state which all ranks share."""
    changed = {graph.values[op.inputs[old]].role for _, old in KINDS[op.kind].updates if old < len(op.inputs)}
    if not changed.isdisjoint(_SAME) and op.kind != GATHER_PARTS:
        yield from (name for name in op.inputs if graph.values[name].role in _OF_A_STEP and not _same(graph, name))


def _same(graph: TrainingGraph, name: str) -> bool:
    """Return whether a value is the next version of a state that is equal on all ranks."""
    return any(name == new and graph.values[old].role in _SAME for old, new in graph.updates)


def _check_once(graph: TrainingGraph, sums: Collection[str]) -> None:
    """Check that no sum over ranks is summed over ranks again."""
    summed = set(sums)
    for op in graph.train:
        inside = not summed.isdisjoint(op.inputs)
        if inside and op.kind in (ALL_REDUCE, REDUCE_SCATTER, GATHER_ROWS):
            _fail(f"'{op.name}' sums a value over ranks that is already summed")
        if inside:
            summed.update(op.outputs)


def _check_shards(graph: TrainingGraph, ranks: Ranks) -> None:
    """Check the parts of a sharded optimizer.

    This rank's part of a sum serves the update of that part, and the norm that all ranks gather. The result of an
    update is gathered from all ranks into its parameter. The shapes determine the rows of each rank (`mbc.ops.shard`),
    so that the parts of all ranks are all rows, each once.
    """
    makers = {output: op for op in graph.train for output in op.outputs}
    readers: dict[str, list[Operation]] = {}
    for op in graph.train:
        for name in op.inputs:
            readers.setdefault(name, []).append(op)
        if op.kind in SHARDED and len(ranks.members) < ranks.size:
            _fail(
                f"'{op.name}' is for ranks that all run one plan: other ranks could have their parts in another order",
                "MBC136",
            )
    normed = [name for op in graph.train if op.kind == "norm" for name in op.inputs]
    for op in graph.train:
        if op.kind == REDUCE_SCATTER:
            part = op.outputs[0]
            kinds = [reader.kind for reader in readers.get(part, ())]
            updates = [kind for kind in kinds if kind in UPDATES_OF_PARTS]
            if len(updates) != 1 or kinds != ["norm"] * bool(normed) + updates:
                _fail(
                    f"'{op.name}' is this rank's part of a sum, but is read by {' and '.join(kinds) or 'nothing'}",
                    "MBC136",
                )
        elif op.kind in UPDATES_OF_PARTS:
            gathers = readers.get(op.outputs[0], [])
            if [(g.kind, g.inputs) for g in gathers] != [(GATHER_PARTS, (op.outputs[0], op.inputs[0]))]:
                _fail(f"'{op.name}' updates a part of '{op.inputs[0]}', which the ranks do not gather once", "MBC136")
        elif op.kind == GATHER_PARTS:
            update = makers.get(op.inputs[0])
            if update is None or update.kind not in UPDATES_OF_PARTS or update.inputs[0] != op.inputs[1]:
                _fail(f"'{op.name}' gathers a value that is not an update of '{op.inputs[1]}'", "MBC136")
        elif op.kind == "norm":
            scattered = all(name in makers and makers[name].kind == REDUCE_SCATTER for name in op.inputs)
            if not scattered or [r.kind for r in readers.get(op.outputs[0], ())] != [ALL_GATHER]:
                _fail(f"'{op.name}' is not a norm of parts of gradients that all ranks gather", "MBC136")


def _check_statistics(graph: TrainingGraph, ranks: Ranks) -> None:
    """Check that batch normalization uses mean and variance of the same rows: this rank's, or all ranks'.

    Statistics of all ranks are synchronised: all ranks have gathered them, weighted by rows, and the backward pass
    counts and sums over all rows.
    """
    outputs = _Outputs({output: (op, i) for op in graph.train for i, output in enumerate(op.outputs)})
    own: set[str] = set()  # statistics of this rank's rows, which are combined with those of other ranks
    for op in graph.train:
        match op.attributes:
            case CombineStatistics(counts):
                gathered = outputs.pair(op, *op.inputs)
                if gathered.kind != ALL_GATHER or outputs.pair(gathered, *gathered.inputs).kind not in STATISTICS:
                    _fail(f"'{op.name}' does not combine the statistics of all ranks")
                if len(counts) != ranks.size or any(
                    c * ranks.rows[0] != counts[0] * r for c, r in zip(counts, ranks.rows, strict=True)
                ):
                    _fail(f"'{op.name}' does not weight the ranks by their rows")
                own.update(gathered.inputs)
                continue
            case BatchNormalize():
                names = op.inputs[1:3] if op.kind == "batch_normalize" else op.inputs[2:4]
                if not outputs.of.keys().isdisjoint(names):  # frozen statistics are states
                    outputs.pair(op, *names)
            case UpdateRunning(count=count):
                _check_count(op, outputs.pair(op, *op.inputs[2:4]), count)
            case BatchNormalizeBackward(count=count):
                statistics = outputs.pair(op, *op.inputs[2:4])
                _check_count(op, statistics, count)
                summed = outputs.pair(op, *op.inputs[4:6])
                if (summed.kind == "sum_gathered") is not isinstance(statistics.attributes, CombineStatistics):
                    _fail(f"'{op.name}' reads sums and statistics of different ranks")
            case _:
                continue
        if not own.isdisjoint(op.inputs):
            _fail(f"'{op.name}' reads statistics of one rank only")


def _check_class_weights(graph: TrainingGraph, ranks: Ranks) -> None:
    """Check that means over weights or counts of classes use those of all ranks, and count this rank's share."""
    makers = {output: op for op in graph.train for output in op.outputs}
    for op in graph.train:
        a, source = op.attributes, _sum_read_by(op)
        if source is None:
            continue
        kinds: list[str] = []
        at, kind = source
        value = op.inputs[at]
        while len(kinds) < 3 and value in makers:
            kinds.append(makers[value].kind)
            value = makers[value].inputs[0]
        if kinds != ["sum_gathered", ALL_GATHER, kind]:
            _fail(f"'{op.name}' is not a mean over the weights of all ranks")
        if isinstance(a, WeightedMean | WeightedMeanBackward | TopKMean | Dice) and not math.isclose(
            a.share, ranks.share, rel_tol=_ROUNDING
        ):
            _fail(f"'{op.name}' counts {a.share} of the mini-batch, but this rank has {ranks.share}")


def _sum_read_by(op: Operation) -> tuple[int, str] | None:
    """Return which operand must be a sum over all ranks, and the kind that sums over one rank's rows; None if none."""
    if op.kind == OVERLAP_MEAN:
        return 0, "class_overlap"
    if op.kind in ("dice_mean", "dice_mean_backward") and isinstance(op.attributes, Dice):
        return (1, "channel_sum") if op.attributes.has_total else None
    return (
        (2, "class_weight_sum") if isinstance(op.attributes, WeightedMean | WeightedMeanBackward | TopKMean) else None
    )


@dataclass(frozen=True)
class _Outputs:
    """For each value, the operation that computes it and the position among its outputs."""

    of: Mapping[str, tuple[Operation, int]]

    def pair(self, reader: Operation, *names: str) -> Operation:
        """Return the operation whose first and second output are `names`."""
        makers = [self.of.get(name) for name in names]
        first = makers[0]
        if first is None or makers != [(first[0], 0), (first[0], 1)]:
            _fail(f"'{reader.name}' reads {' and '.join(names)}, which do not belong together")
        return first[0]


def _check_count(reader: Operation, statistics: Operation, count: int) -> None:
    """Check that an operation that uses statistics of all ranks counts the elements of all ranks."""
    if isinstance(statistics.attributes, CombineStatistics) and count != sum(statistics.attributes.counts):
        _fail(f"'{reader.name}' counts {count} elements, but its statistics {sum(statistics.attributes.counts)}")


def _collectives(plan: Plan) -> Iterator[tuple[object, ...]]:
    """Yield the operations, the settings and the placement of the operands of each collective in order.

    Placement is relative to the first operand, or to the arena if copy engines move the data between ranks.
    """
    copies = ctas_of(plan.train) == BY_COPIES
    for launch in filter(is_collective, plan.train.launches):
        start = 0 if copies else plan.offsets[launch.accesses[0].buffer]
        places = (_place(plan, access.buffer, start) for access in launch.accesses)
        # Gathered values may have any offset.
        yield launch.operations, launch.work, tuple(place if is_bucket(launch) else place[:-1] for place in places)


def _place(plan: Plan, index: int, start: int) -> tuple[object, ...]:
    buffer = plan.buffers[index]
    return buffer.value, buffer.layout, buffer.dtype, buffer.size_bytes, plan.offsets[index] - start


def _weights(plan: Plan) -> Iterator[tuple[str, float]]:
    """Yield the name and the weight of each gradient of a loss."""
    for op in plan.graph.train:
        if isinstance(op.attributes, _LossGradient):
            yield op.name, op.attributes.weight


def _rank(plan: Plan) -> int:
    ranks = plan.graph.ranks
    return 0 if ranks is None else ranks.members[0]


def _fail(message: str, code: str = "MBC135") -> NoReturn:
    raise MbcError(code, f"plans of several GPUs: {message}", _REMEDY)
